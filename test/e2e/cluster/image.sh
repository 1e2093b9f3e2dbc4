#!/usr/bin/env bash
# image.sh NAME:TAG: assembles the driver's image, and packages the chart, in CACHE/release. The
# cluster's registry gets both when the cluster starts.
# image.sh NAME:TAG COMMIT: does the same for an earlier commit, in CACHE/released.
set -euo pipefail
. "$(dirname "$0")/env.sh"
[ $# = 1 ] || [ $# = 2 ] || fail "usage: image.sh NAME:TAG [COMMIT]"
lock
root=$(readlink -f "$here/../../..")
out=$cache/release
if [ $# = 2 ]; then
	out=$cache/released
	[ "$(cat "$out/name" 2>/dev/null)" != "${1##*/}" ] || exit 0
	rm -rf "$out"
	own=$root root=$(mktemp -d /tmp/trivet-e2e-tree.XXXXXX)
	trap 'git -C "$own" worktree remove --force "$root"' EXIT
	git -C "$own" worktree add --quiet --detach "$root" "$2"
fi
mkdir -p "$out" "$bin"
make --no-print-directory -C "$root" image IMAGE="$1" VERSION="${1##*:}"
cp "$root/bin/image.tar" "$out/image.new"
mv "$out/image.new" "$out/image.tar"
if [ $# = 1 ]; then
	cp "$root/bin/release" "$bin/release.new"
	mv "$bin/release.new" "$bin/release"
fi
rm -f "$out"/trivet-*.tgz
go -C "$root" tool -modfile=tools/go.mod helm package deploy/chart -d "$out"
echo "${1##*/}" >"$out/name"
