# shellcheck shell=bash
# Sourced. Downloads packages of any suite of Debian, without the state of this machine,
# to the current directory, which must be empty.

# use_suite SUITE: reads the list of the packages of a suite.
use_suite() {
	mkdir lists cache &&
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $1 main" >sources.list &&
		of_suite apt-get update
}

# of_suite PROGRAM ARG...: runs a program of apt with the packages of the suite, none of which is installed.
of_suite() {
	"$1" -qq -o APT::Sandbox::User=root -o Dir::State="$PWD" -o Dir::State::Status=/dev/null -o Dir::Cache="$PWD/cache" \
		-o Dir::Etc::SourceList="$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null "${@:2}"
}
