# shellcheck shell=bash disable=SC2034
# Sourced in the root of the repository. Sets the programs and names of a release.
registry=${REGISTRY:-ghcr.io/trivet-csi}

fail() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# build_tools builds the programs of other projects and sets their paths. With -n, go tool builds a program in Go's
# build cache and prints its path.
build_tools() {
	local release=release/tools/go.mod
	helm=$(go tool -modfile=tools/go.mod -n helm)
	cosign=$(CGO_ENABLED=0 go tool -modfile=$release -n cosign)
	syft=$(CGO_ENABLED=0 go tool -modfile=$release -n syft)
}
