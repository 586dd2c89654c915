"""The share of the run that each ready node gets: slots, ranks, and the settings for the ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.flags import value_of
from launcher.cli.request import THIS_MACHINE, run_directory, selected
from launcher.cluster import cores, preflight
from launcher.cluster.frontend import FrontEnd
from launcher.cluster.hostfile import MOST_SLOTS, Host
from launcher.cluster.node import Node
from launcher.cluster.node_spec import NodeSpec
from launcher.cluster.selection import first_ranks
from launcher.errors import ConfigError, shortened
from launcher.integrations.surface import SWITCH
from launcher.owner import check_free
from launcher.replica import replica_of

if TYPE_CHECKING:
    from launcher.cli.job import Job

RANKS_A_CORE = 8
"""More ranks per core than this are refused as a mistake."""
logger = logging.getLogger("launcher")


def deal(job: Job, front_end: FrontEnd) -> list[NodeSpec]:
    """Return the share of each ready node; also sets how `front_end` labels the ranks in its output.

    Raises:
        ConfigError: more ranks than devices, or degrees whose product does not match the number of ranks.
    """
    device, hosts = _choose(job, front_end.node_group.nodes)
    hosts = allowed(job, hosts, is_restart=front_end.restarts > 0)
    node_of = {node.name: node for node in front_end.node_group.nodes}
    nodes = front_end.node_group.nodes = [node_of[host.name] for host in hosts]
    counts = [len(host.slots) for host in hosts]
    total = sum(counts)
    for node, count in zip(nodes, counts, strict=True):
        _check_crowd(job, node, count)
    front_end.log_options.places = places(job, total)
    _check_binding(job, counts)
    if job.output_dir is None:
        job.output_dir = run_directory(value_of(job.run.arguments, "--output-dir"), job.run.name)
        if (
            job.run.is_ours and replica_of()[1] == 1
        ):  # fail before anything starts; the agent of rank 0 takes ownership
            check_free(job.output_dir)
    same = common(job, job.output_dir, device)
    shown = [] if job.flags.enable_each_rank_log else _shown(job, total)
    firsts = accumulate(counts[:-1], initial=0)
    front_end.log_options.shown = _names(hosts, shown) if shown != [0] else {}
    front_end.log_options.shows_rank_0 = shown == [0]
    _say_what_starts(job, nodes, counts, device)
    logger.info("run directory: %s", job.output_dir)
    masked = device == "cuda" and (job.flags.hostfile or job.flags.include or job.flags.exclude)
    return [
        replace(
            same,
            target=job.there(node, same.target),
            environment={name: job.there(node, value) for name, value in same.environment.items()},
            ranks=len(host.slots),
            first_rank=first,
            world_size=total,
            node=index,
            nodes=len(nodes),
            shown=shown,
            slots=host.slots if masked else None,
        )
        for index, (node, host, first) in enumerate(zip(nodes, hosts, firsts, strict=True))
    ]


def places(job: Job, total: int) -> Sequence[str]:
    """Return a label for each rank's position on the mesh; empty if a script may still set the stages.

    Raises:
        ConfigError: the degrees do not multiply to the number of ranks.
    """
    if job.config is None:
        return ()
    from launcher.config import ranks

    dp = job.config.dp_degree(total)
    if not job.run.is_ours and job.config.pipeline.stages is None:
        return ()
    return ranks.places(
        job.config.pipeline.degree, dp, job.config.tensor_parallel.degree, job.config.cp_degree
    )


def common(job: Job, output_dir: Path, device: str) -> NodeSpec:
    """Return the settings that the shares of all nodes have in common."""
    flags, run = job.flags, job.run
    to_files = flags.enable_each_rank_log
    variables = {
        "LAUNCHER_DEVICE": device,
        "LAUNCHER_OUTPUT_DIR": str(output_dir),
        "LAUNCHER_RUN": job.id,
    }
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a third-party script would use any GPU that it sees
    if flags.term_grace:
        variables["LAUNCHER_TERM_GRACE"] = str(flags.term_grace)
    if job.source is not None:
        variables["LAUNCHER_CONFIG"] = job.source
    if flags.no_deepspeed_shim:
        variables[SWITCH] = "0"  # the shim may be installed in this environment
    elif not run.is_ours:
        from launcher.cli import hugging_face

        variables |= hugging_face.variables(flags.config)
        logger.info(
            "`import deepspeed` in %s uses this engine; pass --no_deepspeed_shim for the real DeepSpeed",
            run.name,
        )
    bind = flags.bind_cores_to_rank or flags.bind_core_list
    replica, replicas = replica_of()
    logs = output_dir / "logs" / f"replica{replica}" if replica else output_dir / "logs"
    return NodeSpec(
        kind=run.kind,
        target=run.target,
        arguments=run.arguments,
        log_dir=str(Path(to_files).resolve() if to_files else logs),
        log_prefix=time.strftime("%Y%m%d-%H%M%S_") if to_files else "",
        append_local_rank=not (run.is_ours or flags.no_local_rank),
        environment=variables,
        run=job.id,
        owned=str(output_dir) if run.is_ours and replicas == 1 else None,
        watched=True,
        bind_cores=(flags.bind_core_list or "") if bind else None,
    )


def _choose(job: Job, nodes: Sequence[Node]) -> tuple[str, list[Host]]:
    """Return the device type, and the hosts with the slots to use: by default, all slots.

    Raises:
        ConfigError: more ranks are requested than there are devices.
    """
    seen = [node.facts["gpus"] for node in nodes if node.facts is not None]
    device = "cuda" if job.device != "cpu" and min(seen) > 0 else "cpu"
    if not job.late_choice:
        return device, [node.host for node in nodes]
    hosts: list[Host] = []
    for node in nodes if device == "cpu" else ():
        _check_crowd(job, node, job.flags.num_gpus or 1)  # before a huge `range` of slots is built
    for node, gpus in zip(nodes, seen, strict=True):
        wanted = job.flags.num_gpus
        if device == "cuda" and wanted is not None and wanted > gpus:
            raise ConfigError(
                f"{wanted} ranks were requested, but {_spoken(node)} has {gpus} visible CUDA devices",
                where=f"--num_gpus {wanted}",
                fix=f"write --num_gpus {gpus}, or --device cpu to run the ranks on the CPU",
            )
        there = gpus if device == "cuda" else wanted or 1
        hosts.append(Host(node.host.name, tuple(range(there))))
    return device, selected(hosts, job.flags)


def _check_crowd(job: Job, node: Node, ranks: int) -> None:
    """Raise `ConfigError` if a node gets too many ranks for its cores and `--oversubscribe` is not given."""
    assert node.facts is not None
    most = RANKS_A_CORE * int(node.facts["cores"])
    if ranks > MOST_SLOTS or (ranks > most and not job.flags.oversubscribe):
        allowed = f"write at most {most}" + (", or --oversubscribe" if ranks <= MOST_SLOTS else "")
        raise ConfigError(
            f"{ranks:,} ranks on {_spoken(node)}, which has {node.facts['cores']} cores",
            where="--num_gpus, or slots of the hostfile",
            fix=allowed,
        )


def allowed(job: Job, hosts: list[Host], *, is_restart: bool) -> list[Host]:
    """Return the hosts with as many slots as `elasticity` allows; only a restart may leave slots unused.

    Raises:
        ConfigError: `elasticity` does not allow this world size, nor, in a restart, a smaller one.
    """
    total = sum(len(host.slots) for host in hosts)
    sizes = job.config.elasticity.world_sizes if job.config is not None else None
    if job.config is None or sizes is None or total in sizes:
        return hosts
    fewer = [size for size in sizes if size < total]
    if is_restart and fewer:
        logger.warning("elasticity: only %d of %d ranks are used", fewer[-1], total)
        return first_ranks(hosts, fewer[-1])
    from launcher.config.elasticity import refusal

    problem = refusal(job.config.elasticity, total)
    raise ConfigError(problem.what, where=job.config.where("elasticity"), fix=problem.fix)


def _check_binding(job: Job, counts: Sequence[int]) -> None:
    """Report mistakes in core binding before anything starts; the nodes do the actual binding."""
    flags = job.flags
    if (flags.bind_cores_to_rank or flags.bind_core_list) and job.is_here(job.hosts[0]):
        listed = cores.parse_core_list(flags.bind_core_list) if flags.bind_core_list else cores.usable_cores()
        cores.share_cores(listed, counts[0])


def _shown(job: Job, total: int) -> list[int]:
    """Return the ranks whose output goes to the console: rank 0 and the ranks of `--tee`.

    Raises:
        ConfigError: a rank of `--tee` does not exist.
    """
    wanted = job.flags.tee
    if wanted is None:
        return [0] if replica_of()[0] == 0 else []
    if wanted == "all":
        return list(range(total))
    ranks = sorted({0, *(int(text) for text in wanted.split(","))})
    if ranks[-1] >= total:
        raise ConfigError(
            f"rank {ranks[-1]} does not exist",
            where=f"--tee {shortened(wanted)}",
            fix=f"the last rank is {total - 1}",
        )
    return ranks


def _say_what_starts(job: Job, nodes: Sequence[Node], counts: Sequence[int], device: str) -> None:
    first = nodes[0].facts
    assert first is not None
    count = "1 rank" if sum(counts) == 1 else f"{sum(counts)} ranks"
    where = f" of {len(nodes)} hosts ({_few(nodes)})" if len(nodes) > 1 else f" of {nodes[0].name}"
    if nodes[0].name == THIS_MACHINE:
        where = ""
    backend = "nccl" if device == "cuda" else "gloo"
    threads = ""
    if first["threads"] is None and not (job.flags.bind_cores_to_rank or job.flags.bind_core_list):
        number = max(1, first["cores"] // counts[0])
        threads = f", OMP_NUM_THREADS={number} (cores / ranks)"
    logger.info("%s on %s%s, backend %s%s", count, device, where, backend, threads)


def _names(hosts: Sequence[Host], shown: Sequence[int]) -> dict[int, str]:
    """Return the output prefix of each shown rank."""
    host_of = [host.name for host in hosts for _ in host.slots]
    return {rank: f"{host_of[rank]}:{rank}: " if len(hosts) > 1 else f"{rank}: " for rank in shown}


def _spoken(node: Node) -> str:
    return "this machine" if node.name == THIS_MACHINE else node.name


def _few(nodes: Sequence[Node]) -> str:
    return preflight.few([node.name for node in nodes])
