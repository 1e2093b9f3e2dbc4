// Package flexvolume is the plugin of flexVolume volumes: executables of others, one for
// each driver, that are run as a kubelet runs them. An executable is there as soon as it
// is in its directory, and gone as soon as it is not.
//
// The calls and their arguments are those of the kubelet's own plugin
// (kubernetes/community, contributors/devel/sig-storage/flexvolume.md). What a driver
// answers is not believed where the mount table knows better.
package flexvolume
