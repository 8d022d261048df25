"""Rewards: scores of answers. Each kind of reward is one file, and its settings a class below `shoal.config.schema.rlhf.Reward`."""
