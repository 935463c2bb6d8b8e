"""The rollout loop, wherever the policy acts."""
