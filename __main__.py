"""The command line: ``replay-parity`` and ``python -m replay_parity``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from replay_parity.cases.case import CaseError, load_case
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.refusal import Refusal
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.timeline import play
from replay_parity.harness.architectures import ARCHITECTURES, DEFAULT_ARCHITECTURE, known_architecture
from replay_parity.harness.faults import FaultError, fault
from replay_parity.harness.levels import LEVELS, PROFILES, TARGETS
from replay_parity.harness.outcome import FAIL, PASS, UNKNOWN, worst

# commands import what they run, so that a refusal or a listing does not wait for torch

EXIT = {PASS: 0, FAIL: 1, UNKNOWN: 3}
BAD_INPUT = 2
# name -> module of the harness and its function
BENCHES = {
    "schedule": ("bench_schedule", "bench_schedule"),
    "tolerance": ("evidence", "bench_tolerance"),
    "traffic": ("bench_traffic", "bench_traffic"),
    "decode": ("bench_decode", "bench_decode"),
    "interpreter": ("bench_interpreter", "bench_interpreter"),
    "engine": ("bench_engine", "bench_engine"),
    "serving": ("bench_serving", "bench_serving"),
}
DEFAULT_DIR = Path("parity-report")
OWN_DATABASE = ""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 pass, 1 parity failure, 2 bad usage or input, 3 unknown or not judged."""
    arguments = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except Refusal as error:
        print(f"replay-parity: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # the reader of a pipe went away: not our failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: argparse.Namespace) -> int:
    """Run a campaign and write its directory and page."""
    _resumed_settings(arguments)
    if arguments.database is not None:
        # worker processes inherit it
        os.environ["REPLAY_PARITY_DATABASE"] = str(_database(arguments.database))
    levels = _levels(_with_target(arguments.level, arguments.target), arguments.fault)
    _check_architecture(arguments.architecture, levels)
    from replay_parity.harness.campaign import run_campaign
    from replay_parity.harness.compiled_plan import compiled_cases
    from replay_parity.harness.plan import plan, size
    from replay_parity.harness.progress import Progress, say_verdict
    from replay_parity.harness.run_dir import RunDir
    from replay_parity.harness.summary import summarise

    engine_args = _engine_args(arguments.engine_arg)
    jobs, left_out = plan(levels, arguments.profile, arguments.examples, arguments.seed, arguments.architecture)
    compiled, not_compiled = compiled_cases(levels, arguments.target, engine_args, arguments.architecture)
    jobs, left_out = [*jobs, *compiled], [*left_out, *not_compiled]
    run_dir = RunDir(arguments.resume or arguments.out, resume=arguments.resume is not None)
    settings = {
        "levels": levels,
        "profile": arguments.profile,
        "seed": arguments.seed,
        "examples": arguments.examples,
        "fault": arguments.fault,
        "target": arguments.target,
        "engine_arg": arguments.engine_arg,
        "architecture": arguments.architecture,
        "command": _command_line(arguments),
        "not_planned": [vars(entry) for entry in left_out],
        "interrupted": True,
        "missing_levels": [],
    }
    run_dir.write_summary(summarise(run_dir.records(), settings))
    with Progress(size(jobs), len(run_dir.records())) as progress:
        try:
            settings["missing_levels"] = run_campaign(
                jobs,
                run_dir,
                fault=arguments.fault,
                target=arguments.target,
                workers=arguments.workers,
                executor=arguments.executor,
                progress=progress.add,
                engine_args=engine_args,
                architecture=arguments.architecture,
            )
            settings["interrupted"] = False
        except KeyboardInterrupt:
            print(f"replay-parity: interrupted; go on with: replay-parity run --resume {run_dir.path}", file=sys.stderr)
    for line in settings["missing_levels"]:
        print(f"replay-parity: {line}", file=sys.stderr)
    summary = summarise(run_dir.records(), settings)
    run_dir.write_summary(summary)
    page = _page(run_dir.path, None)
    say_verdict(summary, run_dir.records(), page)
    return EXIT[summary["verdict"]]


def _replay(arguments: argparse.Namespace) -> int:
    """Judge one Case file again."""
    case = load_case(arguments.case)
    play(case)
    levels = _levels(_with_target(arguments.level, arguments.target), arguments.fault)
    _check_architecture(arguments.architecture, levels)
    engine_args = _engine_args(arguments.engine_arg)
    from replay_parity.harness.judge_case import judge_case
    from replay_parity.harness.paths import LevelUnavailable, close_path, open_path

    outcomes = []
    for level in levels:
        try:
            path = open_path(level, arguments.fault, arguments.target, engine_args, arguments.architecture)
        except LevelUnavailable as error:
            print(f"{level:9} unknown  {error}")
            outcomes.append(UNKNOWN)
            continue
        try:
            record = judge_case(path, case).record
        finally:
            close_path(path)
        outcomes.append(record["verdict"])
        print(f"{level:9} {record['verdict']:8} {record['reason'] or _worst_ratio(record['distances'])}")
    return EXIT[worst(outcomes)]


def _faults(arguments: argparse.Namespace) -> int:
    """Plant every fault and say which were caught."""
    from replay_parity.harness.fault_dir import FaultDir
    from replay_parity.harness.fault_run import CAUGHT, SURVIVED, Hunt, hunt_all, hunts
    from replay_parity.harness.progress import Progress, say_hunts

    asked = _with_target(arguments.level, arguments.target) or LEVELS
    pairs = hunts([level for level in LEVELS if level in asked], arguments.target)
    out = FaultDir(arguments.out)
    found: list[Hunt] = []
    with Progress(len(pairs), 0) as progress:
        for entry in hunt_all(pairs, arguments.examples, arguments.seed, arguments.workers, arguments.target):
            found.append(entry)
            out.write(found)
            progress.advance(f"{entry.fault} {entry.outcome}")
    say_hunts(found)
    outcomes = {entry.outcome for entry in found}
    return 1 if SURVIVED in outcomes else EXIT[PASS] if outcomes == {CAUGHT} else EXIT[UNKNOWN]


def _cases(arguments: argparse.Namespace) -> int:
    """List the named scenarios, or print one as the JSON that replay takes."""
    table = engine_scenarios() if arguments.engine else scenarios()
    if arguments.action == "list":
        for name, scenario in table.items():
            print(f"{name:32} {scenario.guards}")
        return 0
    if arguments.name not in table:
        raise CaseError(f"NAME: there is no scenario {arguments.name!r}; `replay-parity cases list` names them")
    print(table[arguments.name].case.dumps(), end="")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    """Write the page again from saved records."""
    print(_page(arguments.dir, arguments.against))
    return 0


def _database(given: str) -> Path:
    """The directory that was named, or the user's own."""
    if given != OWN_DATABASE:
        return Path(given).resolve()
    from replay_parity.harness.checkpoint import default_cache_dir

    return default_cache_dir() / "examples"


def _page(run_dir: Path, against: Path | None) -> Path:
    from replay_parity.reports.page import ReportError, write_report

    try:
        return write_report(run_dir, against=against)
    except ReportError as error:
        raise Refusal(str(error)) from None


def _bench(arguments: argparse.Namespace) -> int:
    """Print the figures of a benchmark; those that must not be so are said on stderr too, and fail."""
    from replay_parity.harness.figure import NothingToMeasure

    module, name = BENCHES[arguments.what]
    try:
        figures = getattr(import_module(f"replay_parity.harness.{module}"), name)(arguments.seed)
    except NothingToMeasure as error:
        print(f"replay-parity: {error}", file=sys.stderr)
        return EXIT[UNKNOWN]
    complaints = 0
    for figure in figures:
        print(figure.line)
        if figure.complaint:
            complaints += 1
            print(f"replay-parity: {figure.name}: {figure.complaint}", file=sys.stderr)
    return EXIT[FAIL] if complaints else EXIT[PASS]


def _doctor(arguments: argparse.Namespace) -> int:
    """Say what this machine can run."""
    if arguments.vllm:
        return _doctor_vllm()
    from replay_parity.harness.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{finding.name:12} {'yes' if finding.works else 'no ':4} {finding.detail}")
    return 0 if all(finding.works for finding in findings if finding.name in LEVELS) else EXIT[UNKNOWN]


def _doctor_vllm() -> int:
    """Hold every seam beside the vLLM that is installed; what differs is said on stderr too."""
    from replay_parity.harness.vllm_doctor import examine_vllm

    found = examine_vllm()
    print(found.version)
    for seam in found.seams:
        print(seam.line)
    for line in found.complaints:
        print(f"replay-parity: {line}", file=sys.stderr)
    return EXIT[UNKNOWN] if found.complaints else EXIT[PASS]


def _levels(asked: list[str] | None, fault_name: str | None) -> list[str]:
    """Levels in their fixed order; with a fault and none asked for, those at which it has a form."""
    if fault_name is None:
        return [level for level in LEVELS if level in (asked or LEVELS)]
    forms = fault(fault_name).levels
    wrong = [level for level in asked or () if level not in forms]
    if wrong:
        raise FaultError(f"--fault {fault_name}: has no form at level {wrong[0]}; use --level {' or '.join(forms)}")
    return [level for level in LEVELS if level in (asked or forms)]


def _with_target(asked: list[str] | None, target: str | None) -> list[str] | None:
    """The levels asked for, those of the target where none was. Raises Refusal where one lacks the target."""
    if target is None:
        return asked
    having = [level for level in LEVELS if target in TARGETS[level]]
    wrong = [level for level in asked or () if level not in having]
    if wrong:
        raise Refusal(f"--target {target}: is none of level {wrong[0]}; it has {', '.join(TARGETS[wrong[0]])}")
    return asked or having


def _check_architecture(name: str, levels: Sequence[str]) -> None:
    """Raises Refusal for an unknown architecture, and for another than the first where no level loads a model."""
    known_architecture(name)
    if name != DEFAULT_ARCHITECTURE and "engine" not in levels:
        raise Refusal(f"--architecture {name}: only level engine loads a model; add --level engine")


def _engine_args(pairs: Sequence[str]) -> tuple[tuple[str, object], ...]:
    """KEY=VALUE of --engine-arg, values as JSON where they are that, else as text."""
    read = []
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise Refusal(f"--engine-arg {pair}: must be KEY=VALUE, KEY a name of vLLM's EngineArgs")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        read.append((key, value))
    return tuple(read)


def _resumed_settings(arguments: argparse.Namespace) -> None:
    """A resumed run keeps the interrupted run's plan, whatever else stands on the command line."""
    if arguments.resume is None:
        return
    from replay_parity.harness.run_dir import read_settings

    settings = read_settings(arguments.resume)
    arguments.level, arguments.fault = settings["levels"], settings["fault"]
    arguments.profile, arguments.seed = settings["profile"], settings["seed"]
    arguments.examples, arguments.target = settings["examples"], settings["target"]
    arguments.engine_arg, arguments.architecture = settings["engine_arg"], settings["architecture"]


def _command_line(arguments: argparse.Namespace) -> str:
    words = ["replay-parity", "run"]
    for level in arguments.level or ():
        words += ["--level", level]
    words += ["--profile", arguments.profile, "--seed", str(arguments.seed)]
    words += [] if arguments.examples is None else ["--examples", str(arguments.examples)]
    words += ["--target", arguments.target] if arguments.target else []
    words += ["--fault", arguments.fault] if arguments.fault else []
    for pair in arguments.engine_arg:
        words += ["--engine-arg", pair]
    if arguments.architecture != DEFAULT_ARCHITECTURE:
        words += ["--architecture", arguments.architecture]
    return shlex.join(words)


def _worst_ratio(distances: dict[str, float]) -> str:
    ratios = {name: value for name, value in distances.items() if name.endswith("ratio")}
    return ", ".join(f"{name} {value:.3g}" for name, value in ratios.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay-parity",
        description="Differential correctness harness for recurrent-state decode.",
        epilog="Exit status: 0 pass, 1 parity failure, 2 bad usage or input, 3 unknown or nothing could be judged.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a campaign, write records, summary and the HTML page"))
    replay = commands.add_parser("replay", help="judge one case file again")
    replay.add_argument("case", metavar="CASE.json", type=Path)
    _add_level(replay)
    _add_target(replay)
    _add_engine_arg(replay)
    _add_architecture(replay)
    replay.add_argument("--fault", metavar="NAME", help="plant this fault first")
    replay.set_defaults(command=_replay)
    _add_faults(commands.add_parser("faults", help="plant each fault, report which are caught and how soon"))
    cases = commands.add_parser("cases", help="named scenarios")
    cases.add_argument("action", choices=["list", "show"])
    cases.add_argument("name", nargs="?", metavar="NAME", help="for show")
    cases.add_argument("--engine", action="store_true", help="with the layer shapes of the engine level's checkpoint")
    cases.set_defaults(command=_cases)
    report = commands.add_parser("report", help="write report.html again from a run's records")
    report.add_argument("dir", metavar="DIR", type=Path)
    report.add_argument("--against", metavar="DIR", type=Path, help="compare with an earlier run")
    report.set_defaults(command=_report)
    bench = commands.add_parser("bench", help="throughput and cost; ratios are measured side by side in one run")
    bench.add_argument("--what", choices=BENCHES, default="schedule", help="default: schedule")
    bench.add_argument("--seed", type=_count(0), default=0, metavar="N", help="seed of every draw (default: 0)")
    bench.set_defaults(command=_bench)
    doctor = commands.add_parser("doctor", help="which levels, devices and vLLM this machine can run, and why not")
    doctor.add_argument("--vllm", action="store_true", help="check every name of vLLM's that this package relies on")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_level(run)
    run.add_argument("--profile", choices=PROFILES, default="smoke", help="how much to run (default: smoke)")
    run.add_argument("--examples", type=_count(0), metavar="N", help="generated cases a level (default: the profile's)")
    run.add_argument("--seed", type=_count(0), default=0, metavar="N", help="seed of every draw (default: 0)")
    run.add_argument("--workers", type=_count(1), default=os.cpu_count() or 1, metavar="N", help="worker processes")
    run.add_argument("--executor", choices=["local", "ray"], default="local", help="where workers run")
    _add_target(run)
    _add_engine_arg(run)
    _add_architecture(run)
    run.add_argument("--fault", metavar="NAME", help="plant this fault first: the run must fail")
    run.add_argument(
        "--database",
        nargs="?",
        const=OWN_DATABASE,
        metavar="DIR",
        help="keep failures in a Hypothesis database (without DIR the user's own) and try those it holds first; what "
        "is run then depends on it, not on the seed alone",
    )
    run.add_argument("--out", type=Path, default=DEFAULT_DIR, metavar="DIR", help=f"default: {DEFAULT_DIR}")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with an interrupted run")
    run.set_defaults(command=_run)


def _add_engine_arg(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one of vLLM's EngineArgs for the engine level, the value as JSON or text; may be given again",
    )


def _add_architecture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture",
        default=DEFAULT_ARCHITECTURE,
        metavar="NAME",
        help=f"the model that level engine loads, the other levels load none: {', '.join(ARCHITECTURES)} (default: the "
        "first)",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    names = sorted({name for targets in TARGETS.values() for name in targets})
    parser.add_argument("--target", choices=names, help="what is judged (default: the first of `torch`, `plugin`)")


def _add_faults(faults: argparse.ArgumentParser) -> None:
    _add_level(faults)
    _add_target(faults)
    faults.add_argument("--examples", type=_count(1), default=200, metavar="N", help="budget a fault (default: 200)")
    faults.add_argument("--seed", type=_count(0), default=0, metavar="N", help="seed of every draw (default: 0)")
    faults.add_argument("--workers", type=_count(1), default=os.cpu_count() or 1, metavar="N", help="worker processes")
    faults.add_argument("--out", type=Path, default=DEFAULT_DIR, metavar="DIR", help=f"default: {DEFAULT_DIR}")
    faults.set_defaults(command=_faults)


def _add_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--level", action="append", choices=LEVELS, help="may be given again (default: every level)")


def _count(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, not {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {value}")
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
