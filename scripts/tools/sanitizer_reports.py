"""Judge the reports of memcheck and racecheck. sanitize_kernels.py says which races are Triton's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.tools.compile_without_gpu import disassemble

RACY_KERNEL = "racy_kernel"  # in warp_specialized_probes.py
TRITONS_OWN, WANTED, UNEXPLAINED = "reads a warp's role", "it has a race", "UNEXPLAINED"


class Access(NamedTuple):
    """kind: "Read" or "Write". pc: the byte of the kernel's code. source: "file:line", or None."""

    kind: str
    kernel: str
    pc: int
    source: str | None


class Race(NamedTuple):
    severity: str
    first: Access
    second: Access
    hazards: int


_ACCESS = re.compile(r"(Read|Write) access at (.+?)(?=,? and (?:Read|Write) access at |$)")
_PLACE = re.compile(r"(?P<kernel>\S.*?)\+0x(?P<pc>[0-9a-f]+)(?: in (?P<source>\S+:\d+))?")


def judge_memory(report: str) -> list[str]:
    """Return the problems in memcheck's report, and print what it found."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", report)
    if summary is None:
        return ["memcheck wrote no summary"]
    for line, count in Counter(line for line in _lines(report) if re.match(r"Invalid|at \S+\+0x", line)).items():
        print(f"{count:6} {line}")
    return [f"memcheck counts {summary[1]} errors"] if summary[1] != "0" else []


def judge_races(report: str, role_reads: dict[str, set[int]], with_probes: bool) -> list[str]:
    """Return the problems in racecheck's report, and print a table of its races.

    role_reads: from `find_role_reads`. with_probes: True if the probes ran. One of them has a race.
    """
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazard", report)
    if summary is None:
        return ["racecheck wrote no summary"]
    paragraphs = _find_paragraphs(report)
    races = [race for paragraph in paragraphs for race in read_races(paragraph)]
    problems = [f"unknown to this script: {paragraph}" for paragraph in paragraphs if not read_races(paragraph)]
    if not problems and int(summary[1]) != len(paragraphs):
        problems.append(f"racecheck counts {summary[1]} races, but its report has {len(paragraphs)}")
    rows = Counter()
    for race in races:
        rows[_judge(race, role_reads), race.first.kernel, race.severity] += race.hazards
        if _judge(race, role_reads) == UNEXPLAINED:
            problems.append(f"{race.severity}: {race.first} / {race.second}, {race.hazards} hazards")
    for (verdict, kernel, severity), hazards in sorted(rows.items()):
        print(f"{verdict:20} {kernel}: {hazards} hazards ({severity})")
    if with_probes and not any(verdict == WANTED for verdict, *_ in rows):
        problems.append(f"racecheck does not see the race of {RACY_KERNEL}")
    return problems


def find_role_reads(cache: Path) -> dict[str, set[int]]:
    """Return, by kernel name, the places in compiled warp-specialised kernels where a warp reads its role.

    The role is the only byte that is read from shared memory. With several such reads there are no places, because the
    role's cannot be told from the others.
    """
    places: dict[str, set[int]] = {}
    for path in cache.rglob("*.cubin"):
        if "ttg.warp_specialize" in path.with_suffix(".ttgir").read_text():
            loads = re.findall(r"/\*([0-9a-f]+)\*/[^;]*\bLDS\.[US]8\b", "\n".join(disassemble(path.read_bytes())))
            places.setdefault(path.stem, set()).update(int(place, 16) for place in loads if len(loads) == 1)
    return places


def read_races(paragraph: str) -> list[Race]:
    """Return the races of one paragraph, between its first access and each other one, or [] if it has none."""
    heading = re.match(r"(\w+): *(?:\([^)]*\) *)?Race reported between ", paragraph)
    accesses = [_read_access(*match.groups()) for match in _ACCESS.finditer(paragraph)]
    if heading is None or len(accesses) < 2 or None in accesses:
        return []
    counts = [int(count) for count in re.findall(r"\[(\d+) hazards?\]", paragraph)]
    counts += [1] * (len(accesses) - 1 - len(counts))
    return [Race(heading[1], accesses[0], *other) for other in zip(accesses[1:], counts, strict=False)]


def _read_access(kind: str, place: str) -> Access | None:
    match = _PLACE.match(place)
    return match and Access(kind, match["kernel"], int(match["pc"], 16), match["source"])


def _judge(race: Race, role_reads: dict[str, set[int]]) -> str:
    if race.first.kernel == RACY_KERNEL:
        return WANTED
    accesses = (race.first, race.second)
    own = any(access.kind == "Read" and access.pc in role_reads.get(access.kernel, ()) for access in accesses)
    return TRITONS_OWN if own else UNEXPLAINED


def _find_paragraphs(report: str) -> list[str]:
    """Return each error and warning of a report as one line."""
    paragraphs = []
    is_open = False
    for line in _lines(report):
        if re.match(r"(Error|Warning|Warn|Internal)\b", line, re.IGNORECASE):
            paragraphs.append(line)
            is_open = True
        elif not line or "SUMMARY" in line:
            is_open = False
        elif is_open:
            paragraphs[-1] += f" {line}"
    return paragraphs


def _lines(report: str) -> Iterator[str]:
    """Yield the tool's own lines."""
    for line in report.splitlines():
        if line.startswith("====="):
            yield line.lstrip("=").strip()
