"""`autoptd doctor`: checks of this machine, a line each; under torchrun also checks between ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autoptd.doctor.facts import Finding

if TYPE_CHECKING:
    from autoptd.cost_models.cluster import Cluster
    from autoptd.plans.model import Plan
    from autoptd.profile.world import Place

DONE, NO = 0, 1
_PORT = 29500  # torchrun's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autoptd doctor`."""
    parser.add_argument("--cluster", metavar="NAME", help="the expected machine: a name or a .toml file")
    parser.add_argument("--plan", metavar="FILE", help="the plan to run: its cluster, axes and checkpoint are checked")
    parser.add_argument("--checkpoint", metavar="FOLDER", default=".", help="folder for checkpoints (default: here)")
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"port of rank 0's store (default {_PORT}; unused under torchrun)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a line per check; exit code 1 if one failed. Raises ClusterError, PlanFileError."""
    from autoptd.cli.output import print_json, show

    found = examine(arguments.cluster, arguments.plan, Path(arguments.checkpoint), arguments.port)
    failed = any(finding.grade == "FAIL" for finding in found)
    if os.environ.get("RANK", "0") != "0":  # rank 0 reports
        return DONE
    if arguments.json:
        print_json([asdict(finding) for finding in found])
    else:
        show("\n".join(map(str, found)))
    return NO if failed else DONE


def examine(cluster: str | None, plan: str | None, folder: Path, port: int | None) -> list[Finding]:
    """Return all findings in the order of the checks. A collective under torchrun."""
    from autoptd.cost_models.cluster import Cluster
    from autoptd.plans.model import Plan
    from autoptd.profile.world import joined, launched

    planned = Plan.load(plan) if plan else None
    meant = Cluster.load(cluster) if cluster else planned.cluster if planned else None
    if not launched():
        return list(_alone(meant, planned, folder, _PORT if port is None else port))
    try:
        with joined() as place:
            return list(_together(place, meant, planned, folder, port))
    except RuntimeError as error:  # torch's DistError is one: the store, the network
        said = str(error).strip().splitlines()
        fix = "check MASTER_ADDR, MASTER_PORT and the firewall; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name a network"
        return [Finding("FAIL", "process group", said[0] if said else type(error).__name__, fix)]


def _alone(cluster: Cluster | None, plan: Plan | None, folder: Path, port: int) -> Iterator[Finding]:
    from autoptd.doctor.facts import gather
    from autoptd.doctor.files import check_folder
    from autoptd.doctor.machine import check_machine
    from autoptd.doctor.network import check_port

    yield from check_machine([gather()], cluster)
    yield check_port(port)
    yield from check_folder(folder, plan)


def _together(
    place: Place, cluster: Cluster | None, plan: Plan | None, folder: Path, port: int | None
) -> Iterator[Finding]:
    import torch.distributed as dist

    from autoptd.doctor.facts import gather
    from autoptd.doctor.files import check_folder
    from autoptd.doctor.network import check_clocks, check_links, check_machines, check_reachable, check_shared
    from autoptd.runtime.comm.members import group_of_members

    group = group_of_members("doctor", range(dist.get_world_size()), "gloo", lazy=True)
    yield from check_machines(gather(), cluster, group)
    if plan is not None and plan.world != place.world:
        fix = f"start {plan.world} processes, or plan for world={place.world}"
        yield Finding("FAIL", "world", f"{place.world} ranks run, the plan is for {plan.world}", fix)
        plan = None
    elif plan is not None:
        yield Finding("ok", "world", f"{place.world} ranks, as planned: {plan.mesh}")
    if port is not None:
        yield check_reachable(port, group)
    yield check_clocks(group)
    yield from check_links(place.device, place.node_ranks, plan.mesh if plan else None, cluster)
    yield from check_folder(folder, plan)
    yield check_shared(folder, group)
