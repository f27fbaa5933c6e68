"""The Kubernetes manifests: built by the real Kustomize, valid by Kubernetes' own schemas, true to this version of gpool."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from gpool.agent.settings import AgentSettings
from gpool.cli.lending.join import join
from gpool.cli.lending.up import server
from gpool.cli.pool import invite
from gpool.server.api.callers import FREE
from gpool.server.metrics.catalogue import CATALOGUE
from gpool.server.settings import Settings

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSION = "1.32"
BUILDS = ("server", "overlays/replicas", "overlays/keda", "agent", "agent-unprivileged")
EXAMPLES = ("server/secret.example.yaml", "agent/secret.example.yaml")

Manifest = dict[str, Any]

SCALED_OBJECT: Manifest = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["scaleTargetRef", "triggers"],
            "additionalProperties": False,
            "properties": {
                "scaleTargetRef": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string"},
                        "kind": {"type": "string"},
                        "apiVersion": {"type": "string"},
                    },
                },
                "minReplicaCount": {"type": "integer"},
                "maxReplicaCount": {"type": "integer"},
                "pollingInterval": {"type": "integer"},
                "cooldownPeriod": {"type": "integer"},
                "triggers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "metadata"],
                        "additionalProperties": False,
                        "properties": {
                            "type": {"enum": ["prometheus", "cpu"]},
                            "name": {"type": "string"},
                            "metricType": {"enum": ["AverageValue", "Value", "Utilization"]},
                            "metadata": {"additionalProperties": {"type": "string"}},
                        },
                    },
                },
            },
        },
    },
}
"""The part of KEDA's resource that the overlay uses; Kubernetes' schemas know no custom resources."""


@functools.cache
def built(folder: str) -> tuple[Manifest, ...]:
    words = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=BUILDS)
def manifests(
    request: pytest.FixtureRequest, require: Callable[[str], None]
) -> tuple[Manifest, ...]:
    require("kubectl")
    return built(request.param)


def validate(manifest: Manifest) -> None:
    if manifest["apiVersion"].startswith("keda.sh/"):
        jsonschema.validate(manifest, SCALED_OBJECT)
        return
    importlib.import_module("kubernetes_validate").validate(manifest, VERSION, strict=True)


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    for each in manifests:
        if "template" in each.get("spec", {}):
            yield each["kind"], each["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def only(manifests: tuple[Manifest, ...], kind: str) -> Manifest:
    [found] = [each for each in manifests if each["kind"] == kind]
    return found


def files() -> list[str]:
    return sorted(str(each.relative_to(KUBERNETES)) for each in KUBERNETES.rglob("*.yaml"))


def test_every_file_is_built_or_an_example() -> None:
    folders = {str(Path(each).parent) for each in files()}
    assert folders == set(BUILDS)
    assert {each for each in files() if "example" in each} == set(EXAMPLES)


def test_every_manifest_is_valid(
    manifests: tuple[Manifest, ...], require: Callable[[str], None]
) -> None:
    require("kubernetes-validate")
    for each in manifests:
        validate(each)


def test_the_examples_of_secrets_are_valid_and_hold_none(require: Callable[[str], None]) -> None:
    require("kubernetes-validate")
    for name in EXAMPLES:
        for each in yaml.safe_load_all((KUBERNETES / name).read_text()):
            validate(each)
            for key, value in each["stringData"].items():
                assert "REPLACE" in value or key == "GPOOL_URL"


def test_a_misspelt_field_is_refused(require: Callable[[str], None]) -> None:
    """The control of the two tests above."""
    require("kubectl")
    require("kubernetes-validate")
    wrong = {**only(built("server"), "Deployment"), "spek": {}}
    with pytest.raises(Exception, match="spek"):
        validate(wrong)
    scaled = only(built("overlays/keda"), "ScaledObject")
    with pytest.raises(jsonschema.ValidationError, match="spek"):
        validate({**scaled, "spek": {}})


def test_pods_run_without_privileges_and_on_a_read_only_root(
    manifests: tuple[Manifest, ...],
) -> None:
    for kind, pod in pods(manifests):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            if (kind, container["name"]) == ("DaemonSet", "agent"):
                assert context["privileged"] is True  # sandboxes: docs/guides/deployment.md
                continue
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            if kind != "DaemonSet":
                assert pod["securityContext"]["runAsNonRoot"] is True
                assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_network_policy_and_every_selector_applies_to_the_pods(
    manifests: tuple[Manifest, ...],
) -> None:
    labelled = [each["spec"]["template"]["metadata"]["labels"] for each in manifests if "template" in each.get("spec", {})]  # fmt: skip
    policy = only(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert labelled
    assert all(policy.items() <= each.items() for each in labelled)
    for each in manifests:
        spec = each.get("spec", {})
        wanted = spec.get("selector", {})
        if each["kind"] not in ("PersistentVolumeClaim",) and wanted:
            wanted = wanted.get("matchLabels", wanted)
            assert any(wanted.items() <= found.items() for found in labelled), each["kind"]


def test_only_the_container_that_invites_has_the_owners_key(require: Callable[[str], None]) -> None:
    require("kubectl")
    for folder in ("agent", "agent-unprivileged"):
        for _, pod in pods(built(folder)):
            holders = [each["name"] for each in containers(pod) if "gpool-owner" in str(each)]
            assert holders == ["invite"]


def test_every_variable_is_a_setting(manifests: tuple[Manifest, ...]) -> None:
    texts = [yaml.safe_dump_all(manifests), *((KUBERNETES / each).read_text() for each in EXAMPLES)]
    named = set(re.findall(r"GPOOL_(?:SERVER|AGENT)_[A-Z_]+", "".join(texts)))
    assert named
    known = {f"GPOOL_SERVER_{each.upper()}" for each in Settings.model_fields}
    known |= {f"GPOOL_AGENT_{each.upper()}" for each in AgentSettings.model_fields}
    assert named <= known


def test_the_servers_configuration_is_accepted(require: Callable[[str], None]) -> None:
    require("kubectl")
    data = only(built("server"), "ConfigMap")["data"]
    given = {key.removeprefix("GPOOL_SERVER_").lower(): value for key, value in data.items()}
    settings = Settings(host="0.0.0.0", **given)
    assert settings.is_reached_by_tls
    assert not settings.uses_tls
    host = only(built("server"), "Ingress")["spec"]["rules"][0]["host"]
    assert settings.address == host


VERBS = {"server": server, "gpool join": join, "gpool node invite": invite}


def test_every_option_of_a_command_exists(manifests: tuple[Manifest, ...]) -> None:
    for _, pod in pods(manifests):
        for container in containers(pod):
            words = " ".join([*container.get("command", ()), *container.get("args", ())])
            [verb] = [command for start, command in VERBS.items() if start in words]
            assert isinstance(verb, click.Command)
            options = {each for one in verb.params for each in one.opts}
            assert set(re.findall(r"--[a-z-]+", words)) <= options


def test_probes_ask_the_routes_without_rate_limit_on_the_port_that_is_served(
    require: Callable[[str], None],
) -> None:
    require("kubectl")
    [container] = only(built("server"), "Deployment")["spec"]["template"]["spec"]["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default
    asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}  # fmt: skip
    assert {each["path"] for each in asked.values()} == FREE
    assert asked["readiness"]["path"] == "/readyz"
    assert {each["port"] for each in asked.values()} == {port["name"]}


def test_one_server_runs_unless_the_overlay_says_otherwise(require: Callable[[str], None]) -> None:
    require("kubectl")
    base = only(built("server"), "Deployment")["spec"]
    assert (base["replicas"], base["strategy"]) == (1, {"type": "Recreate"})
    assert only(built("server"), "HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 1
    several = built("overlays/replicas")
    assert "replicas" not in only(several, "Deployment")["spec"]  # the autoscaler's
    assert only(several, "HorizontalPodAutoscaler")["spec"]["minReplicas"] == 2
    claim = only(several, "PersistentVolumeClaim")["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]


def test_keda_replaces_the_autoscaler_and_asks_for_metrics_that_are_exported(
    require: Callable[[str], None],
) -> None:
    require("kubectl")
    manifests = built("overlays/keda")
    assert "HorizontalPodAutoscaler" not in {each["kind"] for each in manifests}
    scaled = only(manifests, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == only(manifests, "Deployment")["metadata"]["name"]
    queries = [each["metadata"].get("query", "") for each in scaled["triggers"]]
    named = set(re.findall(r"gpool_\w+", " ".join(queries)))
    exported = {series for each in CATALOGUE for series in each.series}
    assert {"gpool_nodes_connected", "gpool_tasks_queued"} <= named <= exported
