"""classroom: students' laptops train a GAN through a PostgreSQL database."""

from shoal.config.dialects.table import Dialect, Implied, WrittenKeys, row

_UNITS = "strategy[workunits]"
_DATABASE = "transport[postgres]"


def _imply(seen: WrittenKeys) -> Implied:
    why = "classroom files train a GAN in work units through PostgreSQL"
    own = seen.value("database.host") in (None, "embedded")
    served: Implied = {"data.source.serve": (True, "a class with a server of its own gives its images to students that lack them")}
    return (served if own else {}) | {
        "strategy.kind": ("workunits", why),
        "transport.kind": ("postgres", why),
        "model.kind": ("dcgan", why),
        "data.source.kind": ("images", why),
        "data.source.download": ("nielsr/CelebA-faces", "the data set of classroom files"),
        "training.optimizer.name": ("Adam", "the optimizer of classroom files"),
    }


CLASSROOM = Dialect(
    "classroom",
    "A class trains a GAN through PostgreSQL",
    (
        row("database.host", f"{_DATABASE}.host"),
        row("database.port", f"{_DATABASE}.port"),
        row("database.database", f"{_DATABASE}.database"),
        row("database.user", f"{_DATABASE}.user"),
        row("database.password", f"{_DATABASE}.password"),
        row("training.batch_size", "training.batch_size", default=32),
        row("training.batches_per_work_unit", f"{_UNITS}.batches_per_unit", also=("batches_per_work_unit",)),
        row(
            "training.num_workunits_per_update",
            f"{_UNITS}.units_per_update",
            also=("num_workunits_per_update",),
            old=("training.num_workers_per_update", "num_workers_per_update"),
        ),
        row("training.learning_rate_g", "training.players.generator.learning_rate", default=0.0002),
        row("training.learning_rate_d", "training.players.discriminator.learning_rate", default=0.0002),
        row("training.beta1", "training.optimizer.beta1", default=0.5),
        row("training.beta2", "training.optimizer.beta2", default=0.999),
        row("training.num_epochs", "training.epochs", default=50),
        row("worker.poll_interval", f"{_DATABASE}.poll_interval_s"),
        row("worker.heartbeat_interval", "coordinator.heartbeat_interval_s", default=30),
        row("worker.work_unit_timeout", f"{_UNITS}.lease_timeout_s"),
        row("worker.max_retries", f"{_UNITS}.max_retries"),
        row("worker.num_workers_dataloader", "data.loader.num_workers", default=4),
        row("model.latent_dim", "model[dcgan].latent_dim"),
        row("model.generator_features", "model[dcgan].generator_features"),
        row("model.discriminator_features", "model[dcgan].discriminator_features"),
        row("data.dataset_path", "data.source[images].path", default="data/celeba_torchvision/celeba/img_align_celeba"),
        row("data.num_workers_dataloader", "data.loader.num_workers"),
        row("huggingface.enabled", "hub.enabled"),
        row("huggingface.repo_id", "hub.repo_id"),
        row("huggingface.token", "hub.token"),
        row("huggingface.push_interval", "hub.push_interval"),
        row("huggingface.private", "hub.private"),
    ),
    _imply,
)
