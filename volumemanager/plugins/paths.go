package plugins

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Paths are the paths of a kubelet below its root directory, by default /var/lib/kubelet. Drivers,
// registrars and other programs depend on them.
type Paths struct{ Root string }

// Pods contains a directory for each pod, named by its UID.
func (p Paths) Pods() string { return filepath.Join(p.Root, "pods") }

// Pod returns the directory of a pod.
func (p Paths) Pod(uid types.UID) string { return filepath.Join(p.Pods(), string(uid)) }

// PodVolumes contains a directory for each of a pod's volumes of one plugin.
func (p Paths) PodVolumes(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "volumes", Escape(plugin))
}

// PodVolume returns the directory of one volume of a pod.
func (p Paths) PodVolume(uid types.UID, plugin, name string) string {
	return filepath.Join(p.PodVolumes(uid, plugin), name)
}

// CheckedPodVolume is PodVolume for names of a manifest. It returns an *InvalidError if one of
// them cannot be a part of a path.
func (p Paths) CheckedPodVolume(uid types.UID, plugin, name string) (string, error) {
	return p.PodVolume(uid, plugin, name), checkNames(uid, name)
}

// CheckedPodDevice is PodDevice for names of a manifest, as CheckedPodVolume is PodVolume.
func (p Paths) CheckedPodDevice(uid types.UID, plugin, name string) (string, error) {
	return p.PodDevice(uid, plugin, name), checkNames(uid, name)
}

func checkNames(uid types.UID, name string) error {
	return errors.Join(CheckPart("metadata.uid", string(uid)), CheckPart("volume", name))
}

// PodDevice returns the path of the symbolic link to a raw device of a pod.
func (p Paths) PodDevice(uid types.UID, plugin, name string) string {
	return filepath.Join(p.Pod(uid), "volumeDevices", Escape(plugin), name)
}

// PodPlugin returns the directory for other files of a plugin for a pod.
func (p Paths) PodPlugin(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "plugins", Escape(plugin))
}

// PodSubPaths contains the mounts of a volume's subPaths, as <container>/<index of the
// volumeMount>. The name is the Spec's.
func (p Paths) PodSubPaths(uid types.UID, name string) string {
	return filepath.Join(p.Pod(uid), "volume-subpaths", name)
}

// Plugin returns the directory of a plugin for all pods.
func (p Paths) Plugin(plugin string) string { return filepath.Join(p.Root, "plugins", plugin) }

// Escape returns the directory name for a plugin's name, such as kubernetes.io~csi.
func Escape(plugin string) string { return strings.ReplaceAll(plugin, "/", "~") }

// Unescape undoes Escape.
func Unescape(dir string) string { return strings.ReplaceAll(dir, "~", "/") }

// CheckPart returns an *InvalidError if the value of a field cannot be one part of a path.
func CheckPart(field, value string) error {
	if value == "" || value == "." || value == ".." || len(value) > 253 || strings.ContainsAny(value, "/\x00") {
		return Invalidf("%s %q: want a name that is one part of a path, of at most 253 bytes", field, value)
	}
	return nil
}

// CheckAbsolute returns an *InvalidError if the value of a field is not an absolute path without
// "..".
func CheckAbsolute(field, path string) error {
	if !filepath.IsAbs(path) || slices.Contains(strings.Split(path, "/"), "..") || strings.ContainsRune(path, 0) {
		return Invalidf("%s %q: want an absolute path without ..", field, path)
	}
	return nil
}

// maxSocket is the maximum length of the path of a Unix socket in bytes (unix(7), sun_path without
// the terminating zero).
const maxSocket = 107

// CheckSocket returns an *InvalidError if a path is too long for a Unix socket.
func CheckSocket(path string) error {
	if len(path) > maxSocket {
		return Invalidf("the path of socket %s has %d bytes, and the maximum is %d: use directories with shorter names", path, len(path), maxSocket)
	}
	return nil
}
