"""Fail when a test that should have run was skipped: check_skips.py REPORT.xml PREFIX...

REPORT.xml is pytest's JUnit report; a skip is accepted when its reason begins with one of the prefixes.
"""

import ast
import sys
import xml.etree.ElementTree as ET


def reason(skipped: ET.Element) -> str:
    """The reason given; for a whole module pytest hides it in a printed (path, line, reason) tuple."""
    message = skipped.get("message", "")
    if message == "collection skipped":
        message = str(ast.literal_eval(skipped.text or "('', 0, '')")[2]).removeprefix("Skipped: ")
    return message


def skips(report: str) -> list[tuple[str, str]]:
    """(test, reason) of every skipped test or module; an expected failure is not a skip."""
    return [
        (f"{case.get('classname')}::{case.get('name')}", reason(skipped))
        for case in ET.parse(report).iter("testcase")
        for skipped in case.iter("skipped")
        if skipped.get("type") != "pytest.xfail"
    ]


def main(report: str, *allowed: str) -> int:
    if not any(True for _ in ET.parse(report).iter("testcase")):
        print(f"{report}: no test ran")
        return 1
    wrong = [(test, reason) for test, reason in skips(report) if not reason.startswith(allowed)]
    for test, reason in wrong:
        print(f"skipped here, but must run in CI: {test}: {reason}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
