"""The Kubernetes example: valid for the schemas of Kubernetes, and whole in itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "oobleck.yaml"
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version().rpartition(".")[0]
SECRETS = {"oobleck-daemon", "oobleck-workers"}  # made by hand, as the file says
Document = dict[str, Any]


def documents() -> list[Document]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_document_keeps_to_its_schema(version: str) -> None:
    for document in documents():
        assert kubernetes_validate.validate(document, version, strict=True) == version, document["kind"]


def test_the_schemas_are_looked_at() -> None:
    (worker,) = [
        found
        for found in documents()
        if found["metadata"]["name"] == "oobleck-worker" and found["kind"] == "StatefulSet"
    ]
    wrong = copy.deepcopy(worker)
    wrong["spec"]["podManagementPolice"] = "Parallel"
    with pytest.raises(kubernetes_validate.ValidationError, match="podManagementPolice"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_what_is_named_is_there() -> None:
    found = documents()
    names = {(each["kind"], each["metadata"]["name"]) for each in found}
    for stateful in sets(found):
        spec, pod = stateful["spec"], stateful["spec"]["template"]["spec"]
        assert ("Service", spec["serviceName"]) in names
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod["volumes"]} | claimed
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["image"] == "registry.example/oobleckd:0.1.0"
        assert {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v} <= SECRETS
        assert pod["securityContext"]["runAsNonRoot"] is True
    (daemon, worker) = sets(found)
    address = next(arg for arg in args(worker) if arg.startswith("--daemon="))
    assert address == f"--daemon=tcp://{daemon['metadata']['name']}-0.{daemon['spec']['serviceName']}:7077"


def test_heartbeats_may_come_by_udp_to_the_same_port() -> None:
    found = documents()
    (daemon, _) = sets(found)
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    opened = {(port.get("protocol", "TCP"), port["containerPort"]) for port in container["ports"]}
    (service,) = [
        each for each in found if each["kind"] == "Service" and each["metadata"]["name"] == "oobleckd"
    ]
    served = {(port.get("protocol", "TCP"), port["port"]) for port in service["spec"]["ports"]}
    assert opened == served == {("TCP", 7077), ("UDP", 7077)}


def test_a_worker_has_time_to_leave() -> None:
    (_, worker) = sets(documents())
    pod = worker["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert int(environment["OOBLECK_NOTICE_S"]) < pod["terminationGracePeriodSeconds"]


def test_flags_are_those_of_the_programs() -> None:
    from oobleckd.daemon.app import main as daemon
    from oobleckd.worker.agent.main import main as agent

    for stateful, command in zip(sets(documents()), (daemon, agent), strict=True):
        known = {option for parameter in command.params for option in parameter.opts}
        assert {arg.partition("=")[0] for arg in args(stateful)} <= known
        variables = {f"OOBLECK_{parameter.name.upper()}" for parameter in command.params if parameter.name}
        environment = stateful["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {each["name"] for each in environment if each["name"].startswith("OOBLECK_")} <= variables


def sets(found: list[Document]) -> Iterator[Document]:
    return (each for each in found if each["kind"] == "StatefulSet")


def args(stateful: Document) -> list[str]:
    return stateful["spec"]["template"]["spec"]["containers"][0]["args"]
