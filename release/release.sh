#!/usr/bin/env bash
# release.sh VERSION: writes all files of a release to dist/. Needs a clean worktree and a section of CHANGELOG.md
# for the version. The same commit and the same Go release give the same files, except for the signatures.
# COSIGN_KEY is the private key of the signatures, as a file or a URL that cosign accepts. COSIGN_PASSWORD is its
# password. BUILDER_ID is the URI of the builder in the provenance statement.
set -euo pipefail
cd "$(dirname "$0")/.."
. release/tools.sh

version=${1:-}
[[ $version =~ ^v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$ ]] || fail "VERSION is \"$version\", but must be like v1.2.3"
[ -z "$(git status --porcelain)" ] || fail "the worktree has changes: commit them, so that the release is built from a commit"
notes=$(awk -v version="$version" '/^## / {found = $2 == version; next} found' CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || fail "CHANGELOG.md has no section \"## $version\" with text"
[ -n "${COSIGN_KEY:-}" ] || fail "COSIGN_KEY is not set: it is the private key that signs the release"

build_tools
commit=$(git rev-parse HEAD)
epoch=$(git log -1 --format=%ct)
export VERSION=$version SOURCE_DATE_EPOCH=$epoch
image=$registry/trivet:$version
rm -rf dist
mkdir -p dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# archive FILE DIRECTORY: writes a tar archive that does not depend on the machine.
archive() {
	tar -C "$2" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=go-w,a+rX -c . | gzip -9n >"$1"
}

# documents writes the man pages, and the completions for shells.
documents() {
	local shell
	make --no-print-directory man
	mkdir "$work/documents"
	mv dist/man "$work/documents/"
	mkdir "$work/documents/completion"
	for shell in bash zsh fish; do
		"bin/trivet-linux-$(go env GOHOSTARCH)" completion $shell >"$work/documents/completion/trivet.$shell"
	done
}

binaries() {
	local arch
	make --no-print-directory bin/release bin/trivet-linux-amd64 bin/trivet-linux-arm64
	documents
	for arch in amd64 arm64; do
		cp "bin/trivet-linux-$arch" dist/
		mkdir "$work/$arch"
		cp "bin/trivet-linux-$arch" "$work/$arch/trivet"
		cp -r LICENSE "$work/documents/." "$work/$arch/"
		archive "dist/trivet-$version-linux-$arch.tar.gz" "$work/$arch"
	done
}

# krew writes the manifest of the kubectl plugin. krew cannot unpack links, so the archives contain none.
krew() {
	local arch
	cat <<-END
		apiVersion: krew.googlecontainertools.github.com/v1alpha2
		kind: Plugin
		metadata:
		  name: trivet
		spec:
		  version: $version
		  homepage: https://github.com/trivet-csi/trivet
		  shortDescription: Show the drivers, pools and volumes of Trivet
		  description: |
		    Shows the state of the CSI driver Trivet in a cluster: drivers, pools, volumes with their claims
		    and pods, snapshots, health, I/O and orphans.
		  platforms:
	END
	for arch in amd64 arm64; do
		cat <<-END
			  - selector: {matchLabels: {os: linux, arch: $arch}}
			    uri: https://github.com/trivet-csi/trivet/releases/download/$version/trivet-$version-linux-$arch.tar.gz
			    sha256: $(sha256sum "dist/trivet-$version-linux-$arch.tar.gz" | cut -d' ' -f1)
			    bin: trivet
		END
	done
}

image() {
	bin/release image -out "dist/trivet-$version-image.tar" -name "$image" -version "$version" -revision "$commit" -epoch "$epoch" \
		bin/trivet-linux-amd64 bin/trivet-linux-arm64 | tee "$work/image"
	digest=$(awk 'NR == 1 {print $2}' "$work/image")
}

# chart packages a copy, because helm stores the times of the files.
chart() {
	cp -r deploy/chart "$work/trivet"
	find "$work/trivet" -exec touch -h -d "@$epoch" {} +
	"$helm" package "$work/trivet" --version "${version#v}" --app-version "${version#v}" -d dist
	"$helm" template trivet "dist/trivet-${version#v}.tgz" --namespace trivet-system \
		--set plainManifests=true,image.digest="$digest" >dist/trivet.yaml
}

# sbom NAME SOURCE [FLAG…]: writes dist/NAME.spdx.json. syft sets a random name and the current time, which are
# replaced.
sbom() {
	SYFT_CHECK_FOR_APP_UPDATE=false "$syft" scan --quiet --source-name "$1" --source-version "$version" -o "spdx-json=$work/sbom" "${@:2}"
	sed -E "s|\"documentNamespace\":\"[^\"]*\"|\"documentNamespace\":\"https://github.com/trivet-csi/trivet/releases/$version/$1\"|
		s|\"created\":\"[^\"]*\"|\"created\":\"$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)\"|" "$work/sbom" >"dist/$1.spdx.json"
}

sboms() {
	local arch
	for arch in amd64 arm64; do
		sbom "trivet-linux-$arch" "file:dist/trivet-linux-$arch"
		sbom "trivet-$version-image-linux-$arch" "oci-archive:dist/trivet-$version-image.tar" --platform "linux/$arch"
	done
}

sign() {
	# The image is a subject by its digest in registries, too.
	bin/release provenance -version "$version" -commit "$commit" -builder "${BUILDER_ID:-https://github.com/trivet-csi/trivet/blob/$commit/release/release.sh}" \
		-image "$registry/trivet@$digest" dist/* >"$work/provenance"
	mv "$work/provenance" dist/provenance.intoto.json
	"$cosign" attest-blob --yes --key "$COSIGN_KEY" --signing-config release/signing.json \
		--statement dist/provenance.intoto.json --bundle dist/provenance.sigstore.json
	(cd dist && sha256sum -- *) >"$work/SHA256SUMS"
	mv "$work/SHA256SUMS" dist/
	"$cosign" sign-blob --yes --key "$COSIGN_KEY" --signing-config release/signing.json --bundle dist/SHA256SUMS.sigstore.json dist/SHA256SUMS
	"$cosign" public-key --key "$COSIGN_KEY" >dist/cosign.pub
}

binaries
krew >dist/krew.yaml
image
chart
sboms
# On GitHub, a relative link in release notes is not relative to the repository.
printf '%s\n' "$notes" | sed -E '/./,$!d; s,\]\(([^):#][^):]*)\),](https://github.com/trivet-csi/trivet/blob/'"$version"'/\1),g' >dist/notes.md
sign
chmod go+r dist/*
ls -l dist
