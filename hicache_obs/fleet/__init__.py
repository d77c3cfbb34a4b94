"""Many ranks at once: each analysed by itself, then those that must agree compared."""
