"""Debian's Prometheus scrapes the daemon, with the settings and the alerts of the examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from oobleckd.protocol.job import Job
from tests.helpers import debs
from tests.helpers.cluster import tiny_job
from tests.helpers.unitcluster import CHECKOUT, HOME, UnitCluster, installation

EXAMPLES = CHECKOUT / "examples" / "observability"
NODES = ("node-1", "node-2")
ADDRESS = "127.0.0.1:9464"
ASK_EVERY_S = 0.3
"""By a program, which takes a tenth of a second."""
_FETCH = (
    "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], "
    "timeout=10).read().decode())"
)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnitCluster]:
    """Daemon, two workers and a Prometheus."""
    try:
        packages = debs.fetch("prometheus")
    except debs.NoPackages as error:
        pytest.fail(f"{error}; OOBLECK_NO_HOST_TESTS=1 leaves the host tests out")
    with installation(tmp_path_factory.mktemp("prometheus"), binds={debs.INSIDE: packages}) as box:
        cluster = UnitCluster(box, len(NODES))
        cluster.ask_every_s = ASK_EVERY_S
        cluster.configure(f'[daemon]\nmetrics = "{ADDRESS}"\n[worker]\nspare = false\n')
        cluster.ctl("install-systemd", "--now")
        cluster.ctl("keygen", *NODES)
        cluster.systemctl("reload", "oobleckd")
        cluster.systemctl("start", *(f"oobleck-worker@{node}" for node in NODES))
        debs.install(box)
        for name in ("prometheus.yml", "alerts.yml"):
            box.path(f"/etc/prometheus/{name}").write_text((EXAMPLES / name).read_text())
        cluster.systemctl("restart", "prometheus")
        cluster.usable(len(NODES))
        yield cluster


def fetched(cluster: UnitCluster, url: str) -> str:
    """What the box's own network answers."""
    return cluster.box.run(f"{HOME}/bin/python3", "-c", _FETCH, url).stdout


def asked(cluster: UnitCluster, query: str) -> list[dict[str, Any]] | None:
    """Prometheus's answer to a query; None while it is empty."""
    text = cluster.box.run(
        f"{HOME}/bin/python3",
        "-c",
        _FETCH,
        f"http://127.0.0.1:9090/api/v1/query?query={quote(query)}",
        check=False,
    ).stdout
    return (json.loads(text)["data"]["result"] if text else None) or None


def small() -> Job:
    return tiny_job("scraped", train={"steps": 30}, fault_tolerance={"f": 0})


def test_promtool_finds_nothing_to_mend(scraped: UnitCluster) -> None:
    scraped.box.path("/run/metrics").write_text(fetched(scraped, f"http://{ADDRESS}/metrics"))
    linted = scraped.box.run("sh", "-c", "promtool check metrics </run/metrics")
    assert (linted.stdout, linted.stderr) == ("", "")
    checked = scraped.box.run("promtool", "check", "config", "/etc/prometheus/prometheus.yml")
    assert "SUCCESS" in checked.stdout
    assert "11 rules found" in checked.stdout


def test_a_job_is_seen(scraped: UnitCluster) -> None:
    scraped.until(lambda: asked(scraped, 'up{job="oobleck"} == 1'), "the first scrape")
    job = scraped.client.submit(small()).id
    scraped.job_in(job, "done")
    query = f'oobleck_job_step{{job="{job}"}} == 30'
    (found,) = scraped.until(lambda: asked(scraped, query), "the job's steps in Prometheus")
    assert found["metric"]["instance"] == ADDRESS
    (nodes,) = scraped.until(lambda: asked(scraped, 'oobleck_nodes{state="standby"}'), "nodes")
    assert nodes["value"][1] == "2"


def test_nothing_but_metrics_is_there(scraped: UnitCluster) -> None:
    assert fetched(scraped, f"http://{ADDRESS}/healthz") == "ok\n"
    refused = scraped.box.run(f"{HOME}/bin/python3", "-c", _FETCH, f"http://{ADDRESS}/v1/jobs", check=False)
    assert "404" in refused.stderr
