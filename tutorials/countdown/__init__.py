"""The parts of the Countdown tutorial that are not about reinforcement learning."""
