# fits: none
# exit: 1
# why: a program without a statement does nothing.
