#!/usr/bin/env bash
# compare.sh BASE SUMMARY ARGUMENTS...: runs `memprof run ARGUMENTS` in this checkout and at its commit BASE, and writes
# both as Markdown. The exit code is that of this checkout's run.
set -uo pipefail

base=$1 summary=$(realpath -m "$2")
shift 2
work=$(mktemp -d)
trap 'git worktree remove --force "$work/base" 2>/dev/null; rm -rf "$work"' EXIT

github=()
[[ -n ${GITHUB_STEP_SUMMARY:-} ]] && github=(--github)
memprof run --force --markdown "$summary" --save "$work/now.memprof" "${github[@]}" "$@"
code=$?
[[ -s $summary ]] || printf '### memprof: no answer\n\n`memprof run %s` ended with exit code %d.\n' "$*" "$code" >"$summary"

# A base that cannot be run is no failure of the change: it is said.
git worktree add --quiet --detach "$work/base" "$base" &&
  (cd "$work/base" && memprof run --quiet --save "$work/before.memprof" "$@" >"$work/base.log" 2>&1)
{
  printf '\n**Before and after**\n\n```text\n'
  if [[ -s $work/before.memprof && -s $work/now.memprof ]]; then
    memprof compare "$work/before.memprof" "$work/now.memprof"
  else
    printf 'There is nothing to compare with: %s\n' "$(tail -n 3 "$work/base.log" 2>/dev/null || echo "$base cannot be checked out")"
  fi
  printf '```\n'
} >>"$summary"
exit "$code"
