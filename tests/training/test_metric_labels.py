"""metric_labels: one key in files, other names for people where they fit."""

from anp_jax.training import metric_labels


def test_names_of_metrics():
  plain, pairs = ['loss', 'anp_top1', 'anp_top10'], ['anp_top1', 'noun_top1']
  shown_names = metric_labels.names(plain)
  assert list(shown_names.values()) == ['loss', 'class_top1', 'class_top10']
  assert metric_labels.names(pairs) == {k: k for k in pairs}
  assert list(metric_labels.labels(plain).values()) == ['loss', 'class top-1', 'class top-10']
  assert metric_labels.labels(pairs)['anp_top1'] == 'ANP top-1'
  for name in (*plain, *pairs):
    typed = shown_names.get(name, name)
    assert metric_labels.key(typed) == name


def test_accuracies_are_percents():
  assert metric_labels.format_value('anp_top1', 0.1234) == '12.3%'
  assert metric_labels.format_value('loss', 3.41234) == '3.412'
