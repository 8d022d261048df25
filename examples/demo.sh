# Three files, one run: who decided what?
set -e
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }
say shoal config check base.yaml laptop.yaml islands.yaml --learning_rate 3e-4
say shoal config explain strategy.kind base.yaml laptop.yaml islands.yaml
say shoal config explain training.batch_size base.yaml laptop.yaml islands.yaml --batch_size 32
printf '\nNow a file with slips in it:\n'
printf 'model:\n  kind: gtp\nstrategy:\n  kind: syncps\n  pull_evry_steps: 10\ntraining:\n  batch_size: 08\n' > /tmp/shoal-slips.$$
trap 'rm -f /tmp/shoal-slips.$$' EXIT
say shoal config check --dialect shoal /tmp/shoal-slips.$$ || true
printf '\nTry next: shoal init && shoal config show --origin\n'
