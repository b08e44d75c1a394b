"""Makes an EAGLE-3 draft head for a model: answers, features, training, measuring. `pipeline` puts the stages in a row."""
