"""Run seeds of the simulator: `make sim SEEDS=200`, `make sim SECONDS=600`, `make sim SEED=7` for one with its events.

Each seed runs in a process of its own, forked from one that has imported everything, so that no seed depends on an
earlier one. Prints one JSON object: seeds and operations per hour, how often each fault happened, and which
transitions, errors and faults were not reached; with 10,000 seeds or more nothing may be missing. After a finding the
exit code is 1, and the command that replays its seed is printed. `--seed` and `--reduce` also reduce the seed: they
print a command that runs only the faults, roles and writers which are needed for the finding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from sim import coverage  # noqa: E402
from sim.kinds import SCENARIOS, run_seed  # noqa: E402
from sim.reduction import TRIES, Part, reduced, rules  # noqa: E402
from sim.scenario import ALL_ROLES, Outcome, Size  # noqa: E402
from sim.watch import Watch  # noqa: E402

SEED_SECONDS = 300.0
"""Real seconds that one seed may take, unless an option says otherwise."""
SEED_BYTES = 2 << 30
"""Memory that one seed may take."""


def warm_up() -> None:
    """Run small scenarios, so that the processes of the seeds need not import and parse everything themselves."""
    for kind in SCENARIOS:
        run_seed(0, kind, Size(2, 2, 0, 2.0))


def _outcome(seed: int, kind: str, part: Part | None, **options: Any) -> Outcome:
    """Run a seed; a failure of the simulator is a finding too."""
    try:
        return run_seed(seed, kind, part=part, **options)
    except Exception:
        return Outcome(seed, 0, 0.0, "", {}, finding=f"the simulator failed: {traceback.format_exc().rstrip()}")


Echo = Callable[[str], None]
"""Gets the line of each event."""


def _in_child(seed: int, kind: str, part: Part | None, out: int, echo: Echo | None) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (SEED_BYTES, SEED_BYTES))

    def answer(outcome: Outcome) -> None:
        outcome.cpu_seconds = time.process_time()
        with os.fdopen(out, "wb") as pipe:
            pickle.dump(outcome, pipe)

    watch = Watch(lambda text: answer(Outcome(seed, 0, 0.0, "", {}, finding=text)))
    watch.begin()
    outcome = _outcome(seed, kind, part, clears_away=False, echo=echo, on_world=watch.world)
    watch.over()
    answer(outcome)


class Running(NamedTuple):
    """A seed whose process runs since a time of the machine; `pipe` gets its outcome."""

    seed: int
    pipe: int
    began: float


def outcomes(
    seeds: Iterator[int],
    kind: str,
    workers: int,
    until: float = math.inf,
    seed_seconds: float = SEED_SECONDS,
    part: Part | None = None,
    echo: Echo | None = None,
) -> Iterator[Outcome]:
    """Run seeds, or a part of each, in so many processes at once until there are no more, or until a time."""
    running: dict[int, Running] = {}
    more = True
    while running or more:
        while more and len(running) < workers:
            seed = next(seeds, None) if time.monotonic() < until else None
            if seed is None:
                more = False
                break
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.close(read)
                status = 1
                with suppress(BaseException):
                    _in_child(seed, kind, part, write, echo)
                    status = 0
                os._exit(status)
            os.close(write)
            running[child] = Running(seed, read, time.monotonic())
        if running:
            yield _next_outcome(running, seed_seconds)


def _next_outcome(running: dict[int, Running], seconds: float) -> Outcome:
    import select

    pipes = {one.pipe: child for child, one in running.items()}
    oldest = min(running, key=lambda child: running[child].began)
    left = running[oldest].began + seconds - time.monotonic()
    ready, _, _ = select.select([*pipes], [], [], max(left, 0.0))
    child = pipes[ready[0]] if ready else oldest
    seed, pipe, _ = running.pop(child)
    if not ready:
        os.kill(child, 9)
    with os.fdopen(pipe, "rb") as data:
        content = data.read()
    os.waitpid(child, 0)
    if not content:
        problem = f"ended without a result{'' if ready else f' within {seconds:g} s'}"
        return Outcome(seed, 0, 0.0, "", {}, finding=problem)
    outcome: Outcome = pickle.loads(content)
    return outcome


def report(found: list[Outcome], seconds: float, kind: str) -> dict[str, Any]:
    """The figures of a run."""
    faults: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    for outcome in found:
        faults.update(outcome.counts)
        fates.update(outcome.fates)
        reached.update(outcome.reached)
        roles.update(outcome.roles)
    operations = sum(outcome.operations for outcome in found)
    return {
        "seeds": len(found),
        "findings": sum(bool(outcome.finding) for outcome in found),
        "seeds_per_hour": round(len(found) / seconds * 3600),
        "operations": operations,
        "operations_per_seed": round(operations / max(len(found), 1)),
        "least_operations": min((outcome.operations for outcome in found), default=0),
        "least_faults": min((outcome.faults for outcome in found), default=0),
        "least_restarts": min((outcome.restarts for outcome in found), default=0),
        "operations_per_hour": round(operations / seconds * 3600),
        "cpu_seconds": round(sum(outcome.cpu_seconds for outcome in found), 1),
        "virtual_seconds": round(sum(outcome.virtual_seconds for outcome in found)),
        "transactions": dict(sorted(fates.items())),
        "roles": dict(sorted(roles.items())),
        "faults": dict(sorted(faults.items())),
        "coverage": coverage.report(kind, faults, reached, len(found)),
    }


def replay(seed: int, kind: str, part: Part | None) -> int:
    """Run one seed and print each event when it happens; if it finds something, print what it can be reduced to."""
    (outcome,) = outcomes(iter([seed]), kind, 1, part=part, echo=lambda line: print(line, flush=True))
    print(f"digest {outcome.digest}")
    if not outcome.finding:
        return 0
    print(f"finding: {outcome.finding}", flush=True)
    print(f"the seed has a finding: reducing it, in at most {TRIES} runs", file=sys.stderr, flush=True)
    print(f"reduced: {command(seed, kind, reduce(outcome, kind))}")
    return 1


def reduce(outcome: Outcome, kind: str, seed_seconds: float = SEED_SECONDS) -> Part | None:
    """The part of a seed with a finding that is left when it is reduced; None if only all of it has the finding."""
    wanted = rules(outcome.finding)

    def fails(part: Part) -> bool:
        (again,) = outcomes(iter([outcome.seed]), kind, 1, seed_seconds=seed_seconds, part=part)
        return not wanted.isdisjoint(rules(again.finding))

    return reduced(outcome.part, fails) if fails(outcome.part) else None


def command(seed: int, kind: str, part: Part | None = None) -> str:
    """The command that runs a seed, or a part of it, and prints its events."""
    kind_option = f" KIND={kind}" if kind != "embedded" else ""
    return f"make sim SEED={seed}{kind_option}" + (f" PART='{part}'" if part not in (None, Part()) else "")


def part_of(text: str) -> Part:
    """The part that an option names. Raises ArgumentTypeError."""
    try:
        part = Part.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if unknown := [name for name in part.roles or () if name not in ALL_ROLES]:
        raise argparse.ArgumentTypeError(f"no role is named {unknown[0]!r}; the roles are {', '.join(ALL_ROLES)}")
    return part


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of text are iterated in the order of their hashes
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds; 0: as many as the seconds allow")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="real seconds after which no seed begins; without --seeds 60"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed only, and print its events")
    parser.add_argument(
        "--part", type=part_of, help="run only this part of each seed, such as 'faults=0,3;roles=reader;writers=1'"
    )
    parser.add_argument("--reduce", action="store_true", help="reduce the first seed that has a finding")
    parser.add_argument("--until-found", action="store_true", help="begin no seed after one that has a finding")
    parser.add_argument("--seed-seconds", type=float, default=SEED_SECONDS, help="real seconds that a seed may take")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many seeds run at once")
    parser.add_argument(
        "--kind",
        choices=[*SCENARIOS],
        default="embedded",
        help="what the log is on; see SCENARIOS",
    )
    options = parser.parse_args()
    if options.seed is not None:
        warm_up()  # as before all other seeds
        return replay(options.seed, options.kind, options.part)
    figures = run(options)
    print(json.dumps(figures))
    return exit_code(figures)


def exit_code(figures: dict[str, Any]) -> int:
    """1 if there is a finding, or if many seeds did not reach what they should; else 0."""
    incomplete = figures["seeds"] >= coverage.COMPLETE_SEEDS and figures["coverage"]["missing"]
    return 1 if figures["findings"] or incomplete else 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run seeds and print their findings; return the figures."""
    seconds = options.seconds or (math.inf if options.seeds else 60.0)
    last = options.first + options.seeds if options.seeds else sys.maxsize
    if not options.until_found:  # what is planted may keep even a small scenario from ending
        warm_up()
    began, found = time.monotonic(), list[Outcome]()
    wanted = takewhile(
        lambda _: not (options.until_found and any(one.finding for one in found)), range(options.first, last)
    )
    for outcome in outcomes(wanted, options.kind, options.workers, began + seconds, options.seed_seconds, options.part):
        found.append(outcome)
        if outcome.finding:
            again = command(outcome.seed, options.kind)
            print(
                f"seed {outcome.seed}: {outcome.finding[:2000]}\n  run it again: {again}", file=sys.stderr, flush=True
            )
    figures = report(found, time.monotonic() - began, options.kind)
    first = next((outcome for outcome in found if outcome.finding), None)
    if options.reduce and first is not None:
        part = reduce(first, options.kind, options.seed_seconds)
        print(f"seed {first.seed}, reduced: {command(first.seed, options.kind, part)}", file=sys.stderr)
    return figures


if __name__ == "__main__":
    sys.exit(main())
