// Package plugins is what kinds of volumes have in common for the volume manager: a base
// VolumePlugin, and powers beside it that are found by type assertion. The terms are those
// of the kubelet's own plugins: a Mounter sets a volume up for one pod, an Attacher and a
// DeviceMounter bring it to the machine once for all pods, a BlockVolumeMapper does both
// for raw block.
//
// No plugin lives here, and nothing here keeps state: what is mounted is on disk and in
// the mount table.
package plugins
