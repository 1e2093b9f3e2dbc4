#!/usr/bin/env bash
# publish.sh VERSION: pushes the image and the chart of dist/ to REGISTRY (default ghcr.io/trivet-csi), signs them
# there, and attaches the SBOMs and the provenance statement. Log in first with `helm registry login`. COSIGN_KEY
# and COSIGN_PASSWORD are those of release.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. release/tools.sh
version=${1:-}
[ -f "dist/trivet-$version-image.tar" ] || fail "dist/ has no release $version: run make release VERSION=$version"
[ -n "${COSIGN_KEY:-}" ] || fail "COSIGN_KEY is not set: it is the private key that signs the release"
(cd dist && sha256sum --quiet -c SHA256SUMS)
build_tools
export DOCKER_CONFIG=${DOCKER_CONFIG:-$HOME/.docker}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make --no-print-directory bin/release

# Only registries of this machine may be without TLS.
plain=()
case $registry in 127.0.0.1:* | localhost:*) plain=(--plain-http) ;; esac

key=(--yes --key "$COSIGN_KEY" --signing-config release/signing.json)

image() {
	local digest arch
	bin/release push "dist/trivet-$version-image.tar" "$registry/trivet:$version" | tee "$work/pushed"
	digest=$(awk '$1 == "index" {print $2}' "$work/pushed")
	bin/release predicate dist/provenance.intoto.json >"$work/predicate"
	"$cosign" sign "${key[@]}" --recursive "$registry/trivet@$digest"
	"$cosign" attest "${key[@]}" --type slsaprovenance1 --predicate "$work/predicate" "$registry/trivet@$digest"
	for arch in amd64 arm64; do
		"$cosign" attest "${key[@]}" --type spdxjson --predicate "dist/trivet-$version-image-linux-$arch.spdx.json" \
			"$registry/trivet@$(awk -v arch="linux/$arch" '$1 == arch {print $2}' "$work/pushed")"
	done
}

chart() {
	local digest
	digest=$("$helm" push "dist/trivet-${version#v}.tgz" "oci://$registry/charts" "${plain[@]}" 2>&1 | tee /dev/stderr | awk '$1 == "Digest:" {print $2}')
	"$cosign" sign "${key[@]}" "$registry/charts/trivet@$digest"
}

image
chart
