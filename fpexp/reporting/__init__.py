"""Tables and figures from results/ alone; nothing here imports torch.

A report is a folder: report.md, report.html (one file with everything), figures/ as PNG and SVG, and csv/ for programs:

    <experiment>.csv         a row a setting: n_seeds, asked_seeds; <metric>_<length>_mean and _std of the columns of
                             its table (std: sample standard deviation, empty of one run); iterations (at the training
                             length), training_seconds, steps, reached (longest length in training) and parameters,
                             each _mean and _std; training_length (the longest that training may use), scale, runs
                             (ids); paper_value, paper_std, paper_low and paper_high (a range), paper_says (words),
                             paper_measure. n_seeds = asked_seeds = 0: the paper alone has it
    <experiment>_runs.csv    a row a run: seed, <metric>_<length>, training_seconds, steps, reached, parameters, device
    <experiment>_curves.csv  a row for each setting, metric and length: mean, std, n, runs
    <figure>_figure.csv      a row for each point that is drawn: x and what it is, mean, std, n, runs
    benchmark_<name>.csv     a row for each contender: median_s, lower_quartile_s, upper_quartile_s, ratio, numbers

One number a cell. Accuracies lie between 0 and 1, times are in seconds (_s, _seconds), memory in MB (_MB); an empty
cell was not measured. In those of benchmarks words may say why there is no number.
"""
