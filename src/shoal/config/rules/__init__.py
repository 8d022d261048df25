"""Rules between settings, by subject; importing this package registers all of them."""

from shoal.config.rules import effects, feedback, fleets, models, optimizers, training, updates
from shoal.config.rules.rule import RULES, apply

__all__ = ["RULES", "apply", "effects", "feedback", "fleets", "models", "optimizers", "training", "updates"]
