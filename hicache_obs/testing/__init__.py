"""History notation, fakes, schedule exploration and replay for tests."""
