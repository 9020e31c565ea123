"""The trainer's optimizer step beside other ways to make it: ``python benchmarks/trainer.py``.

Each contender makes the same step on the same rows, with one thread, in a process of its own:

- ``any-agent``: `Policy.train` with the default settings, a row for each turn; and the same with
  ``train.dtype=bfloat16``, with ``train.offload_optimizer``, and in two processes, among which
  weights are divided;
- ``bucketed rows``: a row for each turn, those of like length padded together, plain transformers;
- ``concatenated``: the same, a row for each path from a session's start to a last turn;
- ``TRL, rows`` and ``TRL, concatenated``: TRL's GRPOTrainer on these rows, with its own padding,
  its pass for the importance weights, and its loss.

The peers' size of a pass is swept on a part of the rows; the best is kept. CPU is that of the step
alone (user and system), memory the process's peak; of two processes they are the sums. Each loss
and gradient norm is compared with ours, but for bfloat16's, whose digits are fewer. Ours say how
many tokens they computed for each distinct one.

``--quick`` takes fewer sessions of each workload and smaller models, for each one peer with the
size of a pass that is known to be its best, and one episode. Steps are repeated, and the least CPU
counts: other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.common import finish, machine, parser, ratio
from benchmarks.training_rows import QUICK, WORKLOADS, Workload, make_model
from benchmarks.training_step import OURS, PEERS, work

BASE = "any-agent"
"""The contender that the others are compared with."""
SIZES = (768, 1024, 1536, 3072, 6144)
"""The padded tokens of a pass that are tried for each peer."""
SAMPLE = 6144
"""The tokens of the rows that they are tried on, at least."""
KNOWN: dict[str, dict[str, int | None]] = {
    "W1": {"concatenated": 3072},
    "W2": {"concatenated": 768},
    "W3": {"bucketed rows": 768},
    "W4/25": {"concatenated": 768},
    "W5": {"bucketed rows": 1536},
    "head": {},
}
"""The quick form's peer for each workload, and the size of a pass that is its best in full."""
SAME = 1e-4
"""The bound of a difference in loss, or in the gradient's norm relative to ours."""
HEAD_MEMORY = 14e9 / 4096
"""The free bytes for each token without which full logits of a large vocabulary are not tried."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of this run."""

    rounds: int
    limit: int
    sizes: tuple[int, ...]
    sample: int
    ours: tuple[str, ...]
    enough: float = float("inf")
    """The CPU seconds after which there is no further round."""

    def run(self, contender: str, workload: Workload, **told: Any) -> dict[str, Any] | None:
        """Return the figures of one process; None if it reached the limit of CPU seconds."""
        # Making the model takes its time, too.
        seconds = self.limit * self.rounds + 60
        told |= {"contender": contender, "workload": workload, "seconds": seconds}
        told |= {"rounds": self.rounds, "enough": self.enough}
        # Forked, so that the imports are made once.
        fork = multiprocessing.get_context("fork")
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=work, args=(send, told))
        process.start()
        send.close()
        try:
            return dict(receive.recv())
        except EOFError:
            process.join()
            if process.exitcode == -signal.SIGXCPU:
                return None
            raise RuntimeError(
                f"{contender}, {workload.about}: exit code {process.exitcode}"
            ) from None
        finally:
            process.join()

    def best(self, peer: str, workload: Workload) -> tuple[int, float]:
        """Return the best size of a pass, and the CPU seconds that its sample predicts."""
        found = self.run(peer, workload, sizes=self.sizes, sample=self.sample)
        if found is None:
            return self.sizes[0], float("inf")
        size = min(found, key=lambda size: found[size]["cpu"])
        return int(size), found[size]["whole"]


@dataclass(frozen=True, slots=True)
class Result:
    """One contender's figures, or the reason why it has none."""

    figures: dict[str, Any] | None
    size: int | None = None
    why: str = ""


def compare(
    bench: Bench, name: str, workload: Workload, peers: Mapping[str, int | None]
) -> dict[str, Result]:
    """Measure and print one workload; return the results by contender.

    A peer is given with the size of its passes, or with None: then the best is looked for.
    """
    over = f"over {bench.limit} s"
    out = {ours: Result(bench.run(ours, workload), why=over) for ours in bench.ours}
    for peer, known in peers.items():
        size, predicted = (known, 0.0) if known else bench.best(peer, workload)
        if predicted > bench.limit:
            out[peer] = Result(None, size, f"about {predicted:.0f} s by the sample, not run")
        else:
            out[peer] = Result(bench.run(peer, workload, size=size), size, over)
    show(name, workload.about, out)
    keep(name, out)
    return out


def show(name: str, about: str, results: Mapping[str, Result]) -> None:
    """Print one workload's table; RuntimeError if a contender made another step than we do."""
    print(f"\n{name}: {about}")
    tokens = next((r.figures["tokens"] for r in results.values() if r.figures), None)
    if tokens is not None:
        print(
            "tokens: {rows} in rows of a turn, {paths} concatenated, {distinct} distinct "
            "({share:.2f} of concatenated), {trained} trained".format(
                **tokens, share=tokens["distinct"] / tokens["paths"]
            )
        )
    print(
        f"{'':19}{'CPU s':>8}{'ours/it':>9}{'peak GB':>9}{'ours/it':>9}{'a pass':>8}"
        f"{'loss':>11}{'- ours':>10}{'gradient':>11}{'/ ours - 1':>12}{'computed':>10}"
    )
    ours = results[BASE].figures
    for contender, result in results.items():
        it = result.figures
        if it is None:
            print(f"{contender:19}{result.why}")
            continue
        line = f"{contender:19}{it['cpu']:8.1f}{_over(ours, it, 'cpu'):>9}"
        line += f"{it['peak'] / 1e9:9.2f}{_over(ours, it, 'peak'):>9}"
        line += f"{result.size or 'default':>8}{it['loss']:11.6f}"
        if ours is None:
            print(f"{line}{'':10}{it['norm']:11.6f}")
            continue
        loss, norm = it["loss"] - ours["loss"], it["norm"] / ours["norm"] - 1
        computed = f"{it['computed']:10.3f}" if contender in OURS else ""
        print(f"{line}{loss:10.1e}{it['norm']:11.6f}{norm:12.1e}{computed}", flush=True)
        exact = "dtype" not in OURS.get(contender, {})
        if exact and max(abs(loss), abs(norm)) > SAME:
            raise RuntimeError(f"{name}: {contender} makes another step than {BASE}")


def _over(ours: dict[str, Any] | None, it: dict[str, Any], what: str) -> str:
    return f"{ours[what] / it[what]:.2f}" if ours is not None else "-"


def keep(name: str, results: Mapping[str, Result]) -> None:
    """Record the ratios of each of our ways to each peer, and to the distinct tokens."""
    known = {contender: r.figures for contender, r in results.items() if r.figures}
    peers = [contender for contender in known if contender in PEERS]
    for way in (contender for contender in known if contender in OURS):
        ratio(f"{name} tokens computed: {way} / distinct", known[way]["computed"], 1.0)
        for peer in peers:
            # Which CPU has instructions for bfloat16 decides its time, and not what we do.
            if "dtype" not in OURS[way]:
                ratio(f"{name} CPU: {way} / {peer}", known[way]["cpu"], known[peer]["cpu"])
            ratio(f"{name} memory: {way} / {peer}", known[way]["peak"], known[peer]["peak"])


def growth(found: Mapping[str, Mapping[str, Result]]) -> None:
    """Print the CPU seconds of one episode by its number of turns."""
    print(f"\n{'CPU s by turns':19}" + "".join(f"{name.split('/')[1]:>8}" for name in found))
    for contender in next(iter(found.values())):
        each = (results[contender].figures for results in found.values())
        cells = (f"{it['cpu']:8.1f}" if it else f"{'-':>8}" for it in each)
        print(f"{contender:19}" + "".join(cells))


def head(bench: Bench, workload: Workload) -> None:
    """Print the memory of a large vocabulary's log-probabilities, ours against full logits."""
    needed = HEAD_MEMORY * (workload.added + workload.output)
    free = psutil.virtual_memory().available
    if free < needed:
        print(f"\nhead: needs {needed / 1e9:.0f} GB of free memory, {free / 1e9:.0f} GB are")
        return
    ours = bench.run(BASE, workload)
    peer = bench.run("full logits", workload, size=1)
    if ours is None or peer is None:
        print("\nhead: over the limit")
        return
    print("\nhead: one row of {rows} tokens, {trained} trained".format(**ours["tokens"]))
    print(f"{'':19}{'added GB':>9}{'ours/it':>9}{'CPU s':>8}{'loss - ours':>13}{'computed':>10}")
    for contender, it in ((BASE, ours), ("full logits", peer)):
        computed = f"{it['computed']:10.3f}" if contender in OURS else ""
        print(
            f"{contender:19}{it['added'] / 1e9:9.3f}{_over(ours, it, 'added'):>9}"
            f"{it['cpu']:8.1f}{it['loss'] - ours['loss']:13.1e}{computed}",
            flush=True,
        )
    ratio("head tokens computed: any-agent / distinct", ours["computed"], 1.0)
    ratio("head CPU: any-agent / full logits", ours["cpu"], peer["cpu"])
    ratio("head added memory: any-agent / full logits", ours["added"], peer["added"])


def options() -> argparse.ArgumentParser:
    flags = parser(__doc__)
    flags.add_argument("--only", nargs="+", metavar="NAME", help="W1, W2, W3, W4, W5, head")
    flags.add_argument(
        "--rounds", type=int, help="steps of each; the least CPU is shown (default 1)"
    )
    flags.add_argument(
        "--limit", type=int, default=400, help="leave out what takes more CPU seconds a step"
    )
    flags.add_argument("--against", nargs="*", choices=PEERS, metavar="NAME", help="the peers")
    flags.add_argument(
        "--also", nargs="*", choices=list(OURS)[1:], default=list(OURS)[1:], metavar="NAME"
    )
    flags.add_argument(
        "--sizes", nargs="+", type=int, default=SIZES, help="padded tokens of a pass to be tried"
    )
    return flags


def wanted(args: argparse.Namespace) -> tuple[Bench, dict[str, Workload]]:
    """Return the settings and the workloads of the form that is asked for."""
    bench = Bench(args.rounds or 1, args.limit, tuple(args.sizes), SAMPLE, (BASE, *args.also))
    workloads, names = WORKLOADS, args.only or ["W1", "W2", "W3", "W4", "W5", "head"]
    if args.smoke:
        bench = replace(bench, sizes=(32, 64), sample=64)
        workloads = {name: workload.smallest() for name, workload in WORKLOADS.items()}
        names = args.only or ["W2", "head"]
        importlib.import_module("trl.trainer.grpo_trainer")
    elif args.quick:
        bench = replace(bench, rounds=args.rounds or 3, enough=2.0)
        workloads = QUICK
    return bench, {
        key: workload for name in names for key, workload in workloads.items() if _of(key) == name
    }


def _of(key: str) -> str:
    """Return the name that ``--only`` has for a workload."""
    return key.split("/")[0]


def peers_of(args: argparse.Namespace, key: str, workload: Workload) -> Mapping[str, int | None]:
    """Return the peers of a workload, each with the size of its passes if that is known."""
    peers: Mapping[str, int | None] = KNOWN[key] if args.quick else dict.fromkeys(PEERS)
    if args.against is not None:
        peers = dict.fromkeys(args.against)
    single = len(workload.parents) == 1
    return {peer: peers[peer] for peer in peers if not (single and PEERS[peer] == "paths")}


def main() -> None:
    flags = options()
    args = flags.parse_args()
    if unknown := set(args.only or ()) - {_of(key) for key in WORKLOADS}:
        flags.error(f"no workload is called {', '.join(sorted(unknown))}")
    bench, workloads = wanted(args)
    # Imports the models' classes before the processes are forked, too.
    make_model("tiny")
    print(f"{machine()}; one thread; at most {bench.rounds} rounds")
    episodes = {}
    for key, workload in workloads.items():
        if key == "head":
            head(bench, workload)
            continue
        found = compare(bench, key, workload, peers_of(args, key, workload))
        if _of(key) == "W4":
            episodes[key] = found
    if len(episodes) > 1:
        growth(episodes)
    finish(args)


if __name__ == "__main__":
    main()
