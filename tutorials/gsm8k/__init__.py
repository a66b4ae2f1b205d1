"""Parts of the tutorial on real text: questions in folds, a model, figures with their errors, and the output."""
