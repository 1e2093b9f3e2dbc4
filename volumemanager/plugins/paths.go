package plugins

import (
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Paths are the kubelet's, below a directory that is /var/lib/kubelet there. Drivers,
// registrars and other programs know them.
type Paths struct{ Root string }

// Pods has a directory for each pod, named by its UID.
func (p Paths) Pods() string { return filepath.Join(p.Root, "pods") }

// Pod is a pod's directory.
func (p Paths) Pod(uid types.UID) string { return filepath.Join(p.Pods(), string(uid)) }

// PodVolumes has a directory for each of a pod's volumes of one plugin.
func (p Paths) PodVolumes(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "volumes", Escape(plugin))
}

// PodVolume is the directory of one volume of a pod.
func (p Paths) PodVolume(uid types.UID, plugin, name string) string {
	return filepath.Join(p.PodVolumes(uid, plugin), name)
}

// PodDevice is the symbolic link to a raw device of a pod.
func (p Paths) PodDevice(uid types.UID, plugin, name string) string {
	return filepath.Join(p.Pod(uid), "volumeDevices", Escape(plugin), name)
}

// PodPlugin is what a plugin keeps of a pod beside its volumes.
func (p Paths) PodPlugin(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "plugins", Escape(plugin))
}

// PodSubPaths has what containers see of a volume whose volumeMounts have a subPath:
// <container>/<index of the volumeMount>. The name is the Spec's.
func (p Paths) PodSubPaths(uid types.UID, name string) string {
	return filepath.Join(p.Pod(uid), "volume-subpaths", name)
}

// Plugin is what a plugin keeps for all pods.
func (p Paths) Plugin(plugin string) string { return filepath.Join(p.Root, "plugins", plugin) }

// Escape makes a plugin's name one of a directory: kubernetes.io~csi.
func Escape(plugin string) string { return strings.ReplaceAll(plugin, "/", "~") }

// Unescape is the other way.
func Unescape(dir string) string { return strings.ReplaceAll(dir, "~", "/") }

// CheckPart refuses the value of a field that cannot be one part of a path, with an
// *InvalidError.
func CheckPart(field, value string) error {
	if value == "" || value == "." || value == ".." || len(value) > 253 || strings.ContainsAny(value, "/\x00") {
		return Invalidf("%s %q: want a name that is one part of a path, of at most 253 bytes", field, value)
	}
	return nil
}

// maxSocket is how long the path of a Unix socket can be, in bytes (unix(7), sun_path
// without the zero at its end).
const maxSocket = 107

// CheckSocket refuses a path that is too long for a Unix socket, with an *InvalidError.
func CheckSocket(path string) error {
	if len(path) > maxSocket {
		return Invalidf("the path of socket %s has %d bytes, and can have %d bytes: use directories with shorter names", path, len(path), maxSocket)
	}
	return nil
}
