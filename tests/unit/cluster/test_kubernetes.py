"""Jobs of Kubernetes: manifests by its schema, what a pod does when it ends, and what is said to and by an API, here a small server.

No cluster is tried: pods are processes of this machine, and the server answers as Kubernetes' reference describes it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from samples import Regress, make_loader, make_trainer, make_valid, same_weights

from nbtrain import ConfigError, JobHandle, OptionError
from nbtrain.cluster.command_file import FOLDER


class Waits(Regress):
    """Waits in a step for a file, so that a test knows where the run is; a file `fails` is an error."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        folder = Path(self.save_path or ".")
        if self.counts.step == 7:
            (folder / f"at-{os.environ.get('RANK', 0)}").touch()
            print("at the gate", flush=True)
            while not (folder / "gate").exists():
                time.sleep(0.01)
        if (folder / "fails").exists():
            raise ValueError("not in this cluster")
        return super().train_step(batch)


Waits.__module__ = Waits.train_step.__module__ = "__main__"  # as a class of a cell: its code is sent


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))


def job_of(folder: Path, kind: str = "k8s", n_epoch: int = 3, **options: Any) -> tuple[Any, Path]:
    trainer = make_trainer(Waits, seed=0)
    given = {"image": "me/train:1", "volume": "runs", "mount": folder, "save_path": folder} | options
    return trainer, trainer.to_job(kind, n_epoch, make_loader(), make_valid(), **given)


# -- the manifest
def test_a_job_and_its_service_are_valid_for_kubernetes(tmp_path: Path) -> None:
    more = {"cpus": 4, "memory_gb": 16, "namespace": "ml", "env": {"A": "1"}, "pod": {"nodeSelector": {"gpu": "a100"}}, "sub_path": "me"}
    _, path = job_of(tmp_path, nodes=2, gpus_per_node=4, name="My job", **more)
    service, job = yaml.safe_load_all(path.read_text())
    for document in (service, job):
        kubernetes_validate.validate(document, "1.34", strict=True)
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    (container,) = pod["containers"]
    assert name.startswith("my-job-") and len(name) == len("my-job-") + 8 and service["metadata"]["name"] == pod["subdomain"] == name
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"nvidia.com/gpu": "4", "memory": "16Gi"}}
    assert container["volumeMounts"][0] == {"name": "runs", "mountPath": str(tmp_path), "subPath": "me"}
    assert pod["nodeSelector"] == {"gpu": "a100"} and pod["securityContext"]["runAsUser"] == os.getuid()
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completions"] == 2 and JobHandle(path.parent.parent).info.n_tasks == 8


def test_a_train_job_is_valid_for_kubeflow(tmp_path: Path) -> None:
    _, path = job_of(tmp_path, "kubeflow", nodes=2, gpus_per_node=4, memory_gb=16)
    (document,) = yaml.safe_load_all(path.read_text())
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document  # which leaves out what the schema doesn't know
    assert document["spec"]["trainer"]["numProcPerNode"] == 4


def test_a_job_of_one_pod_needs_no_service_and_keeps_a_name_that_kubernetes_does_not_take(tmp_path: Path) -> None:
    _, path = job_of(tmp_path, tasks_per_node=2, name="Über 실험 7")
    (job,) = yaml.safe_load_all(path.read_text())
    kubernetes_validate.validate(job, "1.34", strict=True)
    assert job["metadata"]["annotations"] == {"nbtrain/name": "Über 실험 7"} and job["metadata"]["name"].startswith("uber-7-")
    handle = JobHandle(path.parent.parent)
    assert (
        handle.name == "Über 실험 7" and handle.info.id == job["metadata"]["name"] and repr(handle).startswith("JobHandle(Über 실험 7, job")
    )
    assert job["kind"] == "Job" and "resources" in job["spec"]["template"]["spec"]["containers"][0]


BAD = {
    "image": ({"image": ""}, 'A job of Kubernetes needs image, a container image with nbtrain in it.\n  Give image="me/train:1".'),
    "option": ({"imag": "x"}, "A job of Kubernetes takes no option 'imag'.\n  Did you mean 'image'?"),
    "nodes": ({"nodes": 0}, "nodes=0 must be a positive integer."),
    "memory": ({"memory_gb": -1}, "memory_gb=-1 must be positive."),
    "type": ({"memory_gb": "16"}, "memory_gb must be"),
    "variables": ({"env": ["A=1"]}, "env must be"),
    "folder": ({"mount": "/data"}, "is not below mount='/data'.\n  Give a folder on the volume."),
    "no volume": ({"mount": None}, "is on no volume that is mounted here."),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_job_is_refused_and_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == Path("/"))
    options, text = BAD[name]
    with pytest.raises((ConfigError, OptionError)) as caught:
        job_of(tmp_path, **options)
    assert text in str(caught.value) and not list(tmp_path.glob("run-*"))


def test_submit_without_a_cluster_says_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No cluster of Kubernetes is known here\.") as caught:
        make_trainer().submit(1, make_loader(), cluster="k8s", image="i", volume="v", mount=str(tmp_path), save_path=tmp_path)
    assert "trainer.to_job(...) writes the manifest without one" in str(caught.value) and not list(tmp_path.glob("run-*"))


# -- pods, which are processes here
def start_pod(path: Path, index: int, port: int) -> subprocess.Popen[str]:
    *_, job = yaml.safe_load_all(path.read_text())
    _, *command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
    of_pod = {"JOB_COMPLETION_INDEX": str(index), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    of_cluster = {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, *command], env=os.environ | of_pod | of_cluster, text=True, cwd=path.parent)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Any, pods: list[subprocess.Popen[str]]) -> None:
    end_s = time.monotonic() + 100
    while not condition():
        assert all(pod.poll() is None for pod in pods) and time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize("n_pods", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_evicted_pod_is_followed_by_one_that_resumes_exactly(n_pods: int, tmp_path: Path) -> None:
    n_epoch = 3 if n_pods == 1 else 40  # ranks agree on a stop some batches later
    trainer, path = job_of(tmp_path, nodes=n_pods, n_epoch=n_epoch)
    port, run_dir = free_port(), path.parent.parent
    pods = [start_pod(path, i, port) for i in range(n_pods)]
    until(lambda: all((tmp_path / f"at-{i}").exists() for i in range(n_pods)), pods)
    pods[-1].send_signal(signal.SIGTERM)
    time.sleep(3 * (n_pods - 1))  # torchrun passes it on
    (tmp_path / "gate").touch()
    assert [pod.wait(100) for pod in pods] == [143] * n_pods
    handle = JobHandle(run_dir, trainer)
    assert handle.status == "restarting" and handle.is_on
    assert [pod.wait(100) for pod in [start_pod(path, i, port) for i in range(n_pods)]] == [0] * n_pods
    assert handle.status == "completed" and handle.wait().n_epochs == n_epoch and handle.log(n_pods - 1).count("at the gate") >= 1
    assert [pod.wait(100) for pod in [start_pod(path, 0, port)]] == [0]  # one that comes late has nothing to do
    whole = make_trainer(Waits, seed=0, save_path=tmp_path)
    if n_pods == 1:
        whole.run(n_epoch, make_loader(), make_valid())
    else:
        whole.submit(n_epoch, make_loader(), make_valid(), cluster="local", tasks_per_node=2).wait()
    assert same_weights(trainer.model, whole.model)


def test_an_error_ends_the_job_and_a_lost_folder_too(tmp_path: Path) -> None:
    trainer, path = job_of(tmp_path, n_epoch=1)
    (tmp_path / "fails").touch()
    assert start_pod(path, 0, 0).wait(100) == 3
    error = JobHandle(path.parent.parent, trainer).error
    assert error is not None and str(error).startswith("ValueError: not in this cluster")
    (path.parent / "job.json").unlink()
    assert start_pod(path, 0, 0).wait(100) == 3


# -- what the API is asked and says
class Api(BaseHTTPRequestHandler):
    """Keeps what is made; `answers` has what is said of it, by the kind of question."""

    made: dict[str, Any]
    answers: dict[str, Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.made[f"{self.path} {body['kind']}"] = body
        body["metadata"]["uid"] = "u1"
        self._say(self.answers.get("made" if body["kind"] != "Service" else "service", (201, body)))

    def do_GET(self) -> None:
        kind = self.path.partition("?")[0].rpartition("/")[2]
        self._say(self.answers.get(kind if kind in ("pods", "events") else "job", (404, {"message": "not found"})))

    def do_DELETE(self) -> None:
        self.made["deleted"] = self.path.partition("?")[0]
        self._say((200, {"kind": "Status", "apiVersion": "v1"}))

    def _say(self, answer: tuple[int, Any]) -> None:
        data = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    kind = type("Recorded", (Api,), {"made": {}, "answers": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster], "contexts": [context]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config | {"users": [{"name": "u", "user": {"token": "t"}}]}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield kind
    server.shutdown()
    server.server_close()


def submitted(folder: Path, cluster: Any = "k8s", **options: Any) -> JobHandle:
    given = {"image": "i", "volume": "v", "mount": str(folder), "save_path": folder} | options
    return make_trainer().submit(1, make_loader(), cluster=cluster, **given)


def pod(phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "spec": {"containers": [], "nodeName": "node-7"}, "status": {"phase": phase, **status}}


def ask(handle: JobHandle) -> str:
    handle._asked_s = float("-inf")
    return handle.status


def test_a_submitted_job_is_made_with_its_service_and_followed_until_it_is_cancelled(tmp_path: Path, api: type[Api]) -> None:
    handle = submitted(tmp_path, nodes=2)
    service = api.made["/api/v1/namespaces/ml/services Service"]
    assert service["metadata"]["ownerReferences"][0]["uid"] == "u1" and "/apis/batch/v1/namespaces/ml/jobs Job" in api.made
    full = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}
    says: dict[str, Any] = {"job": (200, {"metadata": {}, "status": {}}), "pods": (200, {"items": [pod("Pending", conditions=[full])]})}
    api.answers.update(says)
    assert ask(handle) == "pending: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." and handle.node == "node-7"
    waiting = {"name": "node", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waiting |= {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    api.answers["pods"] = (200, {"items": [pod("Pending", containerStatuses=[waiting])]})
    assert ask(handle) == "pending: ImagePullBackOff: no such image"
    quota = {"metadata": {"name": "e"}, "involvedObject": {}, "type": "Warning", "message": "exceeded quota: gpus"}
    api.answers |= {"pods": (200, {"items": []}), "events": (200, {"items": [quota]})}
    assert ask(handle) == "pending: exceeded quota: gpus"
    api.answers["pods"] = (200, {"items": [pod("Running"), pod("Running")]})
    assert ask(handle) == "starting" and handle.is_on
    handle.cancel()
    assert api.made["deleted"] == f"/apis/batch/v1/namespaces/ml/jobs/{handle.info.id}" and ask(handle) == "cancelled"


def test_a_train_job_is_made_and_followed(tmp_path: Path, api: type[Api]) -> None:
    handle = submitted(tmp_path, "kubeflow")
    assert list(api.made) == ["/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs TrainJob"]
    failed = {"type": "Failed", "status": "True", "message": "job failed"}
    api.answers["job"] = (200, {"status": {"conditions": [failed]}})
    assert ask(handle) == "failed"
    handle.cancel()


def test_what_kubernetes_refuses_is_said_in_its_words(tmp_path: Path, api: type[Api]) -> None:
    api.answers["made"] = (403, {"message": 'jobs.batch is forbidden: User "me" cannot create resource "jobs"'})
    with pytest.raises(ConfigError, match=r'Kubernetes refuses: jobs.batch is forbidden: User "me" cannot create'):
        submitted(tmp_path)
    assert not list(tmp_path.glob("run-*"))


def test_a_job_without_its_service_is_not_left_in_the_cluster(tmp_path: Path, api: type[Api]) -> None:
    api.answers["service"] = (403, {"message": "services is forbidden"})
    with pytest.raises(ConfigError, match="Kubernetes refuses: services is forbidden"):
        submitted(tmp_path, nodes=2)
    job = api.made["/apis/batch/v1/namespaces/ml/jobs Job"]["metadata"]["name"]
    assert api.made["deleted"].endswith(f"/jobs/{job}") and not list(tmp_path.glob("run-*"))


def test_a_cluster_that_does_not_answer_is_no_failure_and_contexts_are_read_again_once_they_have_changed(
    tmp_path: Path, api: type[Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = submitted(tmp_path)
    api.answers |= {"job": (200, {"metadata": {}, "status": {}}), "pods": (200, {"items": [pod("Running")]})}
    with monkeypatch.context() as patch:
        patch.setattr("kubernetes.config.load_kube_config", lambda *_, **__: pytest.fail("read again"))
        assert ask(handle) == "starting"
    config = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    assert ask(handle) == "pending: Kubernetes does not answer."
    (handle.run_dir / FOLDER / "started.json").write_text("{}")
    assert ask(handle) == "starting" and handle.error is None
