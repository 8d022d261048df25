"""The files that `shoal up` writes for cluster schedulers: a batch script for Slurm, manifests for Kubernetes.

Neither needs a terminal. A job that was requeued, or a pod that was moved, resumes the run.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shoal.config import Run
from shoal.config.received import arguments_for
from shoal.errors import ShoalError
from shoal.transports.keys import key_text, new_keys, new_token

_FOLDER = "/run/shoal"
"""Where the coordinator's pod has the run's folder."""
_TORCHRUN_PORT = 29400


class BatchScript(NamedTuple):
    """A file for a scheduler, and what a person types to start and to end it."""

    path: Path
    text: str
    start: str
    end: str


def slurm(run: Run, name: str, folder: Path, config: Path, workers: int) -> BatchScript:
    """A batch script: the first node coordinates and every node works, or torchrun starts the processes of one engine on all nodes."""
    settings, name = run.launch.slurm, _plain(name)
    options = [f"--job-name={name}", f"--nodes={workers}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    options.append(f"--output={folder}/slurm-%j.log")
    if gpus := _gpus(run):
        options.append(f"--gpus-per-node={gpus}")
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *settings.options))]
    body = _alone_on_slurm(run, workers) if run.alone else _together_on_slurm(run, workers)
    text = "\n".join([*head, "", "set -euo pipefail", *settings.setup, *_goes_on(folder, config), *body]) + "\n"
    path = folder / "job.sbatch"
    return BatchScript(path, text, f"sbatch {shlex.quote(str(path))}", f"scancel --name={name}")


def _gpus(run: Run) -> int:
    """GPUs of each worker; 0: none, or as many as its machine has."""
    return 0 if run.training.device == "cpu" else run.launch.devices_per_node or 0


def _goes_on(folder: Path, config: Path) -> list[str]:
    """Shell lines that start a run, or resume it where the job was started before."""
    run, file = shlex.quote(str(folder / "run")), shlex.quote(str(config))
    return [f"run={run}", f'if [ -e "$run/config.yaml" ]; then begin="--resume"; else begin={file}; fi']


def _alone_on_slurm(run: Run, nodes: int) -> list[str]:
    if not run.engine.several_processes:
        raise ShoalError("one process on one machine trains (strategy.kind local, engine.kind single): that needs no launcher")
    each = run.launch.devices_per_node or "gpu"
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun torchrun --nnodes={nodes} --nproc-per-node={each} --max-restarts=3 --rdzv-backend=c10d \\",
        f'    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{_TORCHRUN_PORT}" -m shoal train $begin --run-dir "$run"',
    ]


def _together_on_slurm(run: Run, workers: int) -> list[str]:
    return [
        "# The coordinator is on the first node. The token goes to workers through their environment, never on a command line.",
        'shoal coordinate $begin --run-dir "$run" --workers 0 &',
        "coordinator=$!",
        f'until line=$(shoal invite slurm --run "$run" --workers {workers} 2>/dev/null | tail -n 1); [ -n "$line" ]; do',
        '    kill -0 "$coordinator"; sleep 1',
        "done",
        'export SHOAL_TOKEN=$(printf %s "$line" | sed "s/.*--token \\([^ ]*\\).*/\\1/")',
        'join=$(printf %s "$line" | sed "s/ --token [^ ]*//")',
        *(f'join="$join "{shlex.quote(words)}' for words in _allowances(run)),
        "# A worker that dies is started again by its own node until the run is over.",
        "srun --kill-on-bad-exit=0 --overlap bash -c 'for try in 1 2 3 4 5 6 7 8 9; do '\"$join\"' && exit 0; [ $? -eq 2 ] && exit 2;"
        " sleep 5; done; exit 1' &",
        'wait "$coordinator"',
    ]


def _allowances(run: Run) -> list[str]:
    """Options with which the workers may read what the configuration names, as words of a shell."""
    words = arguments_for(run)
    return [shlex.join(words)] if words else []


# --- Kubernetes ------------------------------------------------------------------------------------------


def kubernetes(run: Run, name: str, folder: Path, config: Path, workers: int) -> BatchScript:
    """Manifests: the configuration, the secrets, a volume, a service, the coordinator's job and the workers' job."""
    if run.alone:
        raise ShoalError("strategy.kind local: one engine over several machines is started by torchrun; launch.kind slurm writes that")
    name, settings = _plain(name), run.launch.kubernetes
    keys, port = new_keys(), getattr(run.transport, "port", None)
    if not port:
        raise ShoalError(
            "launch.kind kubernetes: the coordinator's service needs a port that is known: transport.kind zmq, and transport.port"
        )
    volume: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{settings.storage_gb}Gi"}}}
    if settings.storage_class:
        volume["storageClassName"] = settings.storage_class
    service = {"clusterIP": "None", "selector": {"shoal": name}, "ports": [{"name": "shoal", "port": port}]}
    made: list[dict[str, Any]] = [
        _object("v1", "ConfigMap", name, run, data={"config.yaml": config.read_text(encoding="utf-8")}),
        _object("v1", "Secret", name, run, type="Opaque", stringData={"token": new_token(), "key": keys.secret}),
        _object("v1", "PersistentVolumeClaim", name, run, spec=volume),
        _object("v1", "Service", name, run, spec=service),
        _coordinator(run, name, port),
        _workers(run, name, f"tcp://{name}:{port}", key_text(keys.public), workers),
    ]
    path = folder / "manifests.yaml"
    text = "".join(f"---\n{yaml.safe_dump(one, sort_keys=False)}" for one in made)
    return BatchScript(path, text, f"kubectl apply -f {shlex.quote(str(path))}", f"kubectl delete -f {shlex.quote(str(path))}")


def _object(version: str, kind: str, name: str, run: Run, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": run.launch.kubernetes.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _coordinator(run: Run, name: str, port: int) -> dict[str, Any]:
    begin = f"if [ -e {_FOLDER}/run/config.yaml ]; then begin=--resume; else begin=/config/config.yaml; fi"
    container = {
        "name": "coordinator",
        "image": run.launch.kubernetes.image,
        "command": ["sh", "-c", f"{begin}; exec shoal coordinate $begin --run-dir {_FOLDER}/run --workers 0 --host 0.0.0.0"],
        "env": [_secret("SHOAL_TOKEN", name, "token"), _secret("SHOAL_SECRET_KEY", name, "key")],
        "ports": [{"containerPort": port}],
        "volumeMounts": [{"name": "run", "mountPath": _FOLDER}, {"name": "config", "mountPath": "/config"}],
    }
    volumes = [{"name": "run", "persistentVolumeClaim": {"claimName": name}}, {"name": "config", "configMap": {"name": name}}]
    return _job(f"{name}-coordinator", run, {"shoal": name}, {"containers": [container], "volumes": volumes}, {})


def _workers(run: Run, name: str, address: str, key: str, workers: int) -> dict[str, Any]:
    """A job with an index, so that each pod is the same worker again after it was moved."""
    allowed = "".join(f" {words}" for words in _allowances(run))
    command = f"exec shoal join {address} --key {shlex.quote(key)} --name worker-$JOB_COMPLETION_INDEX{allowed}"
    container: dict[str, Any] = {
        "name": "worker",
        "image": run.launch.kubernetes.image,
        "command": ["sh", "-c", command],
        "env": [_secret("SHOAL_TOKEN", name, "token")],
    }
    if gpus := _gpus(run):
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    counts = {"completionMode": "Indexed", "completions": workers, "parallelism": workers}
    return _job(f"{name}-workers", run, {"shoal-workers": name}, {"containers": [container]}, counts)


def _job(name: str, run: Run, labels: dict[str, str], pod: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    template = {"metadata": {"labels": labels}, "spec": {"restartPolicy": "OnFailure", **pod}}
    return _object("batch/v1", "Job", name, run, spec={**counts, "backoffLimit": 100, "template": template})


def _secret(variable: str, name: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _plain(name: str) -> str:
    """A name as Kubernetes and DNS allow it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "shoal"
