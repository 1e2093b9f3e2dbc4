// Package flexvolume is the plugin of flexVolume volumes. It runs third-party executables, one for
// each driver, as a kubelet does. A driver is installed while its executable is in its directory.
//
// The calls and their arguments are those of the kubelet's plugin (kubernetes/community,
// contributors/devel/sig-storage/flexvolume.md). After each call the plugin checks the mount
// table.
package flexvolume
