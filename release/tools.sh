# shellcheck shell=bash disable=SC2034
# Sourced in the root of the repository. Sets the programs and names of a release.
registry=${REGISTRY:-ghcr.io/trivet-csi}

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# With -n, go tool builds a program in Go's build cache and prints its path.
helm=$(go tool -modfile=tools/go.mod -n helm)
export CGO_ENABLED=0
cosign=$(go tool -modfile=release/tools/go.mod -n cosign)
syft=$(go tool -modfile=release/tools/go.mod -n syft)
