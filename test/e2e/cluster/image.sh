#!/usr/bin/env bash
# image.sh NAME:TAG: builds the driver's image from the project's Dockerfile, without a
# registry, into an archive. The nodes of a cluster import the archive when they start.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/bases.sh"
[ $# = 1 ] || fail "usage: image.sh NAME:TAG"
target=$1
root=$(readlink -f "$here/../../..")
# All files have the same timestamp, so that equal builds have equal digests.
epoch=${SOURCE_DATE_EPOCH:-0}

image() {
	# Remove the containers of a build that was killed.
	b rm --all >/dev/null
	# The name protects this stage from the pruning below.
	build --target xfsprogs -t localhost/xfsprogs
	build -t "$target"
	rm -f "$cache/driver.tar"
	b push --quiet "$target" "oci-archive:$cache/driver.tar:$target"
	mv "$cache/driver.tar" "$images/driver.tar"
	sizes >"$cache/driver-sizes"
	# Remove the layers of the last build. With vfs each layer contains all layers below it.
	b rmi --prune >/dev/null 2>&1 || true
}

build() {
	b build --quiet --platform "linux/$(go env GOARCH)" --layers --pull-never --timestamp "$epoch" \
		--build-arg VERSION="${target##*:}" "$@" "$root" &>"$cache/image.log" || {
		tail "$cache/image.log"
		return 1
	}
}

sizes() {
	local dir=$cache/tmp/sizes manifest layer bytes packed=0 unpacked=0 base=
	rm -rf "$dir"
	mkdir -p "$dir"
	tar -C "$dir" -xf "$images/driver.tar"
	blob() { echo "$dir/blobs/sha256/$1"; }
	digests() { grep -oE '"digest":"sha256:[0-9a-f]{64}"' "$1" | grep -oE '[0-9a-f]{64}'; }
	manifest=$(digests "$dir/index.json" | head -n 1)
	# The first digest is that of the configuration.
	for layer in $(digests "$(blob "$manifest")" | tail -n +2); do
		bytes=$(gzip -dc "$(blob "$layer")" | wc -c)
		unpacked=$((unpacked + bytes)) packed=$((packed + $(stat -c %s "$(blob "$layer")")))
		base=${base:-$(printf '%d MB (%d MB compressed)' $((unpacked / 1000000)) $((packed / 1000000)))}
	done
	echo "$target sha256:$manifest"
	printf '%d MB (%d MB compressed), of which the base is %s\n' $((unpacked / 1000000)) $((packed / 1000000)) "$base"
	rm -r "$dir"
}

debian_packages debootstrap:debootstrap buildah:buildah
lock
mkdir -p "$cache/tmp" "$images"
echo "$target $epoch" >"$cache/driver-wanted"
cd "$root"
mapfile -t excluded < <(sed 's/^/:!/' .dockerignore)
# Without the list of sources, `once` would never build the image again.
git ls-files -z -co --exclude-standard -- . "${excluded[@]}" >"$cache/tmp/sources" || fail "git ls-files fails in $root"
# git also lists files that were deleted from the worktree.
mapfile -d '' -t sources < <(while IFS= read -r -d '' f; do [ ! -f "$f" ] || printf '%s\0' "$f"; done <"$cache/tmp/sources")
[ ${#sources[@]} -gt 0 ] || fail "git lists no sources in $root"
once debian debian_rootfs "$here/bases.sh"
once bases bases "$cache/stamps/debian" "$here/bases.sh"
once image image "$cache/driver-wanted" "$cache/stamps/bases" Dockerfile .dockerignore "${sources[@]}"
cat "$cache/driver-sizes"
