"""The plan of a cluster: the command's options, as start values of replicas. Independent of Ray.

A plan passes through Ray, so it contains no secret: keys are files that every machine has, or variables of
its environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from holdfast.engine.durable.places import is_database
from holdfast.engine.options import OptionError, make_options
from holdfast.server.options import ServerOptions

__all__ = ["REPLICAS_MAX", "ClusterOptions", "Plan", "make_plan", "read_plan", "written"]

REPLICAS_MAX = 1024
OF_ONE_ENGINE = ("engine", "hang_seconds", "storm")
"""Options of a server that mean nothing, or something else, over several engines."""
PASSWORDS = frozenset({"password", "sslpassword"})
"""Parameters of a database's URL that are secret."""
SECRETS = {"admin_key": "HOLDFAST_ADMIN_KEY"}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How many replicas, and where.

    There are `replicas` engines, up to `max_replicas` under load, and `api_replicas` API processes. An engine
    takes `replica_cpus` of a machine's processors, and a GPU unless it computes on the CPU. Without
    `ray_address` a cluster is started on this machine, and ends with the command.
    """

    replicas: int | None = None
    max_replicas: int | None = None
    api_replicas: int | None = None
    replica_cpus: float = 1.0
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.replicas is None:
            for name in ("max_replicas", "api_replicas", "ray_address"):
                if getattr(self, name) is not None:
                    raise OptionError(name, "needs --replicas")
            return
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise OptionError("replicas", f"must be from 1 to {REPLICAS_MAX}, not {self.replicas}")
        if self.max_replicas is not None and not self.replicas <= self.max_replicas <= REPLICAS_MAX:
            raise OptionError("max_replicas", f"must be from --replicas to {REPLICAS_MAX}")
        if self.api_replicas is not None and not 1 <= self.api_replicas <= REPLICAS_MAX:
            raise OptionError("api_replicas", f"must be from 1 to {REPLICAS_MAX}")
        if not 0 < self.replica_cpus < float("inf"):
            raise OptionError("replica_cpus", "must be a positive number of processors")

    @property
    def api_count(self) -> int:
        """API processes: two, so that one serves while another is replaced; one beside a single engine."""
        return self.api_replicas or min(self.replicas or 1, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that replicas need to know. The options are those that were given, by name."""

    model: str
    cluster: ClusterOptions
    engine: dict[str, Any]
    server: dict[str, Any]

    @property
    def options(self) -> ServerOptions:
        """The options of API processes, before they know the engines."""
        return ServerOptions(**{name: value for name, value in self.server.items() if name != "link_keys"})

    @property
    def link_keys(self) -> str:
        """The key file of the links; every machine has it."""
        return str(self.server["link_keys"])

    @property
    def journal(self) -> str | None:
        """The journal that all engines share."""
        return self.engine.get("journal")

    def as_values(self) -> dict[str, Any]:
        """The plan as values that JSON can write; `read_plan` reads them."""
        return asdict(self)


def make_plan(
    model: str, cluster: ClusterOptions, engine: Mapping[str, Any], server: Mapping[str, Any]
) -> Plan:
    """A plan of checked options; raises `OptionError`."""
    assert cluster.replicas is not None, "the command serves a cluster"
    for name in OF_ONE_ENGINE:
        if server.get(name):
            raise OptionError(name, "cannot be combined with --replicas")
    if "link_keys" not in server:
        raise OptionError(
            "link_keys", "is required with --replicas: make a key file with `holdfast link-keys FILE`"
        )
    device = str(engine.get("device", "auto"))
    if ":" in device:
        raise OptionError("device", f"must not name one GPU ({device}) with --replicas: Ray chooses them")
    if engine.get("tensor_parallel", 1) != 1:
        raise OptionError(
            "tensor_parallel", "cannot be combined with --replicas, whose engines have one GPU each"
        )
    journal = engine.get("journal")
    if journal is not None and not is_database(journal):
        raise OptionError(
            "journal", "must be a postgresql:// URL with --replicas: engines on all machines write to it"
        )
    if journal is not None and _has_password(journal):
        raise OptionError(
            "journal",
            "must not contain a password, because it would pass through Ray: use PGPASSFILE or PGPASSWORD",
        )
    make_options(**engine)
    plan = Plan(model, cluster, dict(engine), dict(server))
    _ = plan.options  # Raises if one is invalid.
    return plan


def _has_password(journal: str) -> bool:
    parts = urlsplit(journal)
    return parts.password is not None or not PASSWORDS.isdisjoint(dict(parse_qsl(parts.query)))


def read_plan(values: Mapping[str, Any]) -> Plan:
    """The plan in values, such as the arguments of an application in a Serve configuration file."""
    known = {"model", "cluster", "engine", "server"}
    if unknown := sorted(values.keys() - known):
        raise OptionError(unknown[0], f"is an unknown section; a plan has {', '.join(sorted(known))}")
    try:
        cluster = ClusterOptions(**values.get("cluster", {}))
    except TypeError as error:
        raise OptionError("cluster", f"has an unknown option: {error}") from error
    server = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.get("server", {}).items()
    }
    for name, variable in SECRETS.items():
        if name in server:
            raise OptionError(name, f"must not be in a plan, which Ray shows; set {variable}")
    return make_plan(str(values.get("model", "")), cluster, values.get("engine", {}), server)


def written(stated: Mapping[str, Any]) -> list[str]:
    """Options as arguments of a command."""
    arguments: list[str] = []
    for name, value in stated.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments
