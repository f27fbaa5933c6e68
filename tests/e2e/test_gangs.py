"""Gangs on real machines of their own (network namespaces on one bridge): real sandboxes, real lanes, real engines."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools import components
from tests.tools.engines import IMAGE, PrivateEngine, docker_client, engine
from tests.tools.networks import unused_network
from tests.tools.processes import (
    LONG_LEASE,
    SHORT_LEASE,
    NeverHappened,
    Pool,
    eventually,
    processes_saying,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "gangs"
HOSTS = ("first", "second", "third")
PATIENCE_S = 300
LOSING = {**SHORT_LEASE, "GPOOL_SERVER_TTL_S": "8", "GPOOL_SERVER_MARGIN_S": "1"}
"""Engines keep a machine busy while they start: an agent that waits for its turn is not to be taken for dead."""
SLOWER = (1, 5, 15)
"""How slowly what is to be disturbed works: so much slower where it was over before it could be."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Site:
    """Three machines and a server on one bridge."""

    def __init__(self, folder: Path, engine: PrivateEngine | None) -> None:
        """`engine`: the container engine that all of them use."""
        self.engine = engine
        self.mark = os.getpid()
        self.network = unused_network()
        self.lease = LONG_LEASE
        self.pool = Pool(folder, self.lease, host=f"{self.network}.1")

    def space(self, name: str) -> str:
        return f"gpool-{self.mark}-{name}"

    def lay(self) -> None:
        bridge = f"gb{self.mark}"
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{self.network}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(HOSTS):
            space, near = self.space(name), f"gv{self.mark}-{number}"
            ip("netns", "add", space)
            ip("link", "add", near, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", near, "master", bridge, "up")
            ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def clear(self) -> None:
        for number, name in enumerate(HOSTS):
            subprocess.run(["ip", "link", "delete", f"gv{self.mark}-{number}"], check=False)
            subprocess.run(["ip", "netns", "delete", self.space(name)], check=False)
        subprocess.run(["ip", "link", "delete", f"gb{self.mark}"], check=False)

    def address(self, name: str) -> str:
        return f"{self.network}.{11 + HOSTS.index(name)}"

    def start(self) -> None:
        self.pool.start(agents=())
        for name in HOSTS:
            within = ("nsenter", f"--net=/run/netns/{self.space(name)}")
            if self.engine is not None:
                within = (*within, "env", f"DOCKER_HOST={self.engine.address}")
            flags = ("--site", "lab", "--address", self.address(name))
            self.pool.joining(name, *flags, within=within)
        self.until_whole()

    def until_whole(self) -> None:
        """All at once, and each tries its lanes and its engine first."""
        whole = set(HOSTS)
        eventually("all are online", lambda: whole <= set(self.pool.online()), PATIENCE_S)

    def under(self, lease: Mapping[str, str]) -> Pool:
        self.revive()
        if lease != self.lease:
            self.pool.restart_server(**lease)
            self.until_whole()
            self.lease = lease
        return self.pool

    def revive(self) -> None:
        """Whoever was killed by an earlier test comes back, while two others are there for the next gang."""
        for agent in self.pool.agents.values():
            if not agent.is_running:
                agent.start()

    # ---- tasks

    def submit(self, example: str, *options: str, words: Sequence[str] = ()) -> str:
        script = str(EXAMPLES / example)
        done = self.pool.gpool("run", "-d", "--nodes", "2", *options, script, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def printed(self, task: str) -> str:
        items = self.pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
        return "".join(item["text"] for item in items)

    def until_printed(self, task: str, text: str, within_s: float = PATIENCE_S) -> None:
        def there() -> bool:
            document = self.pool.status(task)
            ended = document["status"] in ("failed", "cancelled")
            assert not ended, f"{document['error_text']}\n{self.printed(task)}"
            return text in self.printed(task)

        eventually(f"it prints {text!r}", there, within_s, every_s=0.1)

    def until_up(self, task: str) -> None:
        """Both members have said so."""
        self.until_printed(task, "[1] up")
        both = {"up", "[1] up"}
        eventually("both are up", lambda: both <= {*self.printed(task).splitlines()}, PATIENCE_S)

    def members(self, task: str) -> list[str]:
        """Names of their nodes, by rank."""
        document = self.pool.status(task)
        nodes = {n["id"]: n["name"] for n in self.pool.ask("GET", "/v1/nodes").json()["items"]}
        return [nodes[one["node"]] for one in sorted(document["members"], key=lambda m: m["rank"])]

    def is_over(self, task: str) -> bool:
        return self.pool.status(task)["status"] in ("succeeded", "failed", "cancelled")

    def ended(self, task: str) -> dict[str, Any]:
        eventually("it ends", lambda: self.is_over(task), PATIENCE_S, every_s=0.1)
        return self.pool.status(task)

    def disturbed(
        self, submit: Callable[[int], str], text: str, rank: int, *, saved: bool
    ) -> tuple[str, list[str]]:
        """A task that is formed anew because a member's agent was killed after that text, and where it had been."""
        for slower in SLOWER:
            task = submit(slower)
            self.until_printed(task, text)
            if saved:
                eventually(
                    "a checkpoint counts",
                    lambda task=task: (
                        bool(self.pool.status(task)["checkpoint"])  # type: ignore[misc]
                        or self.is_over(task)
                    ),
                    PATIENCE_S,
                )
            epoch, before = self.pool.status(task)["epoch"], self.members(task)
            self.pool.agents[before[rank]].kill()
            eventually(
                "it is formed anew",
                lambda task=task, epoch=epoch: (
                    self.pool.status(task)["epoch"] > epoch  # type: ignore[misc]
                    or self.is_over(task)
                ),
                PATIENCE_S,
                every_s=0.1,
            )
            if self.pool.status(task)["epoch"] > epoch:
                return task, before
            self.revive()
        raise NeverHappened("it was always over before its agent was killed, or not formed anew")


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Site]:
    for component in ("network namespaces", "bubblewrap"):
        require(component)
    with contextlib.ExitStack() as stack:
        docker = None
        if components.missing("docker") is None:
            docker = stack.enter_context(engine("docker"))
        made = Site(tmp_path_factory.mktemp("site"), docker)
        try:
            made.lay()
            made.start()
            yield made
        finally:
            stack.callback(made.clear)
            made.pool.stop()


@pytest.fixture
def pool(site: Site) -> Pool:
    """For what is not disturbed. So that its logs are shown when a test fails."""
    return site.under(LONG_LEASE)


@pytest.fixture
def losing(site: Site) -> Pool:
    """Whoever is killed is given up soon. Tests that ask for it stand last: the server is started anew for them."""
    return site.under(LOSING)


TALK = """
import os, socket, sys
rank, addresses = int(os.environ["GPOOL_RANK"]), os.environ["GPOOL_ADDRESSES"].split(",")
if rank == 0:
    with socket.create_server((addresses[0], 7000)) as door:
        print("heard", door.accept()[0].makefile().readline().strip(), flush=True)
else:
    import time
    while True:
        try:
            talk = socket.create_connection(("rank0", 7000), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    talk.sendall(b"from rank 1\\n")
    for address in sys.argv[1:]:
        try:
            socket.create_connection((address, int(os.environ["PORT"])), timeout=1)
            print("reached", address, flush=True)
        except OSError:
            print("nothing at", address, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("image", ["", IMAGE])
def test_members_reach_each_other_and_nothing_else(
    site: Site, pool: Pool, require: Callable[[str], None], image: str
) -> None:
    """In bubblewrap, and in containers that the engine outside made."""
    outside = (f"{site.network}.1", site.address("first"), site.address("second"))
    wanted: dict[str, Any] = {
        "command": ["python", "-c", TALK, *outside],
        "env": {"PORT": str(pool.port)},
        "nodes": 2,
    }
    if image:
        require("docker")
        wanted["recipe"] = {"image": image}
    task = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    assert site.ended(task)["status"] == "succeeded", site.printed(task)
    said = site.printed(task)
    assert "heard from rank 1" in said
    assert "reached" not in said
    for address in outside:
        assert f"[1] nothing at {address}" in said
    # The control: the server is there for whoever is on the bridge.
    assert pool.ask("GET", "/readyz").status_code == 200


@pytest.mark.slow
def test_the_command_line_shows_all_members(site: Site, pool: Pool) -> None:
    words = "echo I am $GPOOL_RANK of $GPOOL_NODES at $GPOOL_ADDRESS"
    done = pool.gpool("run", "--nodes", "2", "--name", "who", "--", "sh", "-c", words)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "I am 0 of 2 at 10.211.0.1",
        "[1] I am 1 of 2 at 10.211.0.2",
    ]
    [task] = [one for one in pool.json("ps") if one["name"] == "who"]
    shown = pool.gpool("status", task["id"]).stdout
    for member in pool.status(task["id"])["members"]:
        place = f"{member['node_name']} ({member['node']})"
        assert f"rank {member['rank']} on {place} (exited)" in shown
    failed = pool.gpool("run", "--nodes", "2", "--", "sh", "-c", "exit $((4 + GPOOL_RANK * 0))")
    assert failed.returncode == 4


COUNT = """
i=0; test -f state/i && { i=$(cat state/i); echo goes on at $i; }
mkdir -p state
trap 'echo $i > state/i.tmp; mv state/i.tmp state/i; exit 0' TERM
echo up; while :; do i=$((i+1)); sleep 0.05; done
"""


@pytest.mark.slow
def test_a_gang_makes_room_outlives_the_server_and_is_cancelled_as_a_whole(
    site: Site, pool: Pool
) -> None:
    mark = f"gang-{os.getpid()}"
    command = ["sh", "-c", COUNT, mark]
    wanted = {"command": command, "nodes": 2, "checkpoint": "state/", "grace_s": 600}
    task = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    site.until_up(task)
    pool.ask("POST", f"/v1/tasks/{task}/preempt")
    site.until_printed(task, "[1] goes on at")  # every member finds what the first one saved
    document = pool.status(task)
    assert (document["epoch"], document["tries"], document["losses"]) == (2, 0, 0)
    pool.server.kill()
    pool.start_server()

    def all_run() -> bool:
        """The server may have been away for longer than their leases: then it is formed anew."""
        members = pool.status(task)["members"]
        return [one["status"] for one in members] == ["running", "running"]

    eventually("all members run", all_run, PATIENCE_S, every_s=0.1)
    pool.ask("DELETE", f"/v1/tasks/{task}")
    eventually("nothing of it runs", lambda: not processes_saying(mark), PATIENCE_S)
    assert site.ended(task)["status"] == "cancelled"


@pytest.mark.slow
def test_torchrun_sums_over_two_nodes(
    site: Site, pool: Pool, require: Callable[[str], None]
) -> None:
    require("torch")
    options = ("--engine", "torchrun", "--checkpoint", "state/")
    task = site.submit("train.py", *options, words=("--steps", "10", "--pause", "0"))
    document = site.ended(task)
    said = site.printed(task)
    assert document["status"] == "succeeded", said
    assert (document["epoch"], document["losses"]) == (1, 0)
    assert "rank 0 of 2 has 330\n" in said  # 4 weights x (1 + … + 10) x the mean of ranks 1 and 2
    assert "[1] rank 1 of 2 has 330\n" in said
    assert len(set(site.members(task))) == 2


@pytest.mark.slow
def test_ray_computes_on_two_nodes_undisturbed(
    site: Site, pool: Pool, require: Callable[[str], None]
) -> None:
    require("ray")
    options = ("--engine", "ray", "--memory", "1GB")
    task = site.submit("squares.py", *options, words=("--count", "10", "--pause", "0.1"))
    document = site.ended(task)
    assert document["status"] == "succeeded", site.printed(task)
    assert (document["epoch"], document["losses"]) == (1, 0)
    assert "285 from 2 nodes\n" in site.printed(task)


# ---- losing members


def of_our_image(site: Site) -> list[str]:
    assert site.engine is not None
    with docker_client(site.engine) as api:
        return [one["Id"] for one in api.containers(filters={"ancestor": IMAGE})]


@pytest.mark.slow
def test_containers_and_their_network_never_outlive_a_killed_agent(
    site: Site, losing: Pool, require: Callable[[str], None]
) -> None:
    require("docker")
    wanted = {
        "command": ["sh", "-c", "echo up; exec sleep 1000"],
        "recipe": {"image": IMAGE},
        "nodes": 2,
        "on_loss": "end",
    }
    task = losing.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    site.until_up(task)
    eventually("both are there", lambda: len(of_our_image(site)) == 2, PATIENCE_S)
    losing.agents[site.members(task)[1]].kill()
    assert site.ended(task)["status"] == "failed"
    eventually("no container of it is left", lambda: of_our_image(site) == [], PATIENCE_S)


@pytest.mark.slow
def test_torchrun_goes_on_elsewhere_when_an_agent_is_killed(
    site: Site, losing: Pool, require: Callable[[str], None]
) -> None:
    require("torch")
    options = ("--engine", "torchrun", "--checkpoint", "state/", "--checkpoint-every", "1s")

    def train(slower: int) -> str:
        pause = str(0.1 * slower)
        return site.submit("train.py", *options, words=("--steps", "80", "--pause", pause))

    # The first member's agent: it is its checkpoint that counts.
    task, before = site.disturbed(train, "step 15 of 80", rank=0, saved=True)
    document = site.ended(task)
    said = site.printed(task)
    assert document["status"] == "succeeded", (document, said)
    assert (document["losses"] >= 1, document["tries"]) == (True, 0)
    assert "goes on at step" in said
    assert "rank 0 of 2 has 19440\n" in said  # 4 x (1 + … + 80) x 1.5: no step twice, none left out
    assert "[1] rank 1 of 2 has 19440\n" in said
    assert before[0] not in site.members(task)


@pytest.mark.slow
def test_a_gang_that_is_to_end_with_a_loss_fails_and_says_why(site: Site, losing: Pool) -> None:
    mark = f"sleep 600.{os.getpid()}"
    wanted = {
        "command": ["sh", "-c", f"echo up; exec {mark}"],
        "nodes": 2,
        "on_loss": "end",
        "retries": 3,
    }
    task = losing.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    site.until_up(task)
    lost = site.members(task)[1]
    losing.agents[lost].kill()
    document = site.ended(task)
    assert document["status"] == "failed"
    assert document["epoch"] == 1
    assert "rank 1 was lost" in document["error_text"], document
    assert "on_loss=end" in document["error_text"]
    seconds = mark.partition(" ")[2]
    eventually("nothing of it runs", lambda: not processes_saying(seconds), PATIENCE_S)


@pytest.mark.slow
def test_ray_computes_on_two_nodes_though_an_agent_is_killed(
    site: Site, losing: Pool, require: Callable[[str], None]
) -> None:
    require("ray")
    options = ("--engine", "ray", "--memory", "1GB")

    def square(slower: int) -> str:
        pause = str(0.2 * slower)
        return site.submit("squares.py", *options, words=("--count", "60", "--pause", pause))

    task, before = site.disturbed(square, "10 of 60", rank=1, saved=False)
    document = site.ended(task)
    said = site.printed(task)
    assert document["status"] == "succeeded", (document, said)
    assert document["losses"] >= 1  # one; a machine that Ray keeps busy may lose another
    assert "70210 from 2 nodes\n" in said
    assert before[1] not in site.members(task)
