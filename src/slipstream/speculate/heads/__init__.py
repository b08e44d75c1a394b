"""Draft heads of the EAGLE family: their layers, their published formats, and the trees they draft."""
