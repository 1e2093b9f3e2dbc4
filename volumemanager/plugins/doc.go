// Package plugins defines the interfaces of volume plugins: VolumePlugin, which each plugin
// implements, and optional interfaces, which are found by type assertion. The terms are those of
// the kubelet's own plugins. A Mounter sets a volume up for one pod. An Attacher and a
// DeviceMounter attach and mount a volume once for all pods of the node. A BlockVolumeMapper
// stages a raw device, and publishes it to a pod.
//
// The package contains no plugin and keeps no state: mounts are found on disk and in the mount
// table.
package plugins
