"""Supporting code of the Countdown tutorials: task, models, algorithm settings, reports."""
