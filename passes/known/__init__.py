"""Functions that models of several libraries call and that cannot be traced as they are, with forms that can."""
