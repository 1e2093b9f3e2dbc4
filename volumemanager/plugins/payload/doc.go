// Package payload contains the plugins of volumes whose content comes from manifests: configMap,
// secret, downwardAPI, and projected, which combines them and service account tokens. One rename
// replaces the whole content, so that a reader of an open directory or a resolved link sees either
// the old content or the new one. Only configMap volumes are on disk. The others are in a tmpfs, with
// noswap if the kernel supports it.
//
// The plugins keep no state: they read the current content from the volume.
package payload
