"""The implementations behind `impl=`; each turns a `Problem` into statistics, none knows the others."""
