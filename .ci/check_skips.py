"""Fail when a test that should have run was skipped: check_skips.py [--tree TREE.xml] REPORT.xml PREFIX...

REPORT.xml is pytest's JUnit report; a skip is accepted when its reason begins with one of the prefixes. With the
report of the tests in the tree, one that was skipped because it needs the tree must be among those.
"""

import argparse
import ast
import sys
import xml.etree.ElementTree as ET

NEED_TREE = ("checkout:", "shared data:")


def reason(skipped: ET.Element) -> str:
    """The reason given; for a whole module pytest hides it in a printed (path, line, reason) tuple."""
    message = skipped.get("message", "")
    if message == "collection skipped":
        message = str(ast.literal_eval(skipped.text or "('', 0, '')")[2]).removeprefix("Skipped: ")
    return message


def name(case: ET.Element) -> str:
    """The test's name, the same in every report."""
    return f"{case.get('classname')}::{case.get('name')}"


def skips(report: str) -> list[tuple[str, str]]:
    """(test, reason) of every skipped test or module; an expected failure is not a skip."""
    return [
        (name(case), reason(skipped))
        for case in ET.parse(report).iter("testcase")
        for skipped in case.iter("skipped")
        if skipped.get("type") != "pytest.xfail"
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree")
    parser.add_argument("report")
    parser.add_argument("allowed", nargs="*")
    options = parser.parse_args()
    for report in filter(None, (options.report, options.tree)):
        if not any(True for _ in ET.parse(report).iter("testcase")):
            print(f"{report}: no test ran")
            return 1
    skipped = skips(options.report)
    wrong = [(test, why) for test, why in skipped if not why.startswith(tuple(options.allowed))]
    if options.tree:
        in_tree = {name(case) for case in ET.parse(options.tree).iter("testcase")}
        wrong += [(test, why) for test, why in skipped if why.startswith(NEED_TREE) and test not in in_tree]
    for test, why in wrong:
        print(f"skipped here, but must run in CI: {test}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
