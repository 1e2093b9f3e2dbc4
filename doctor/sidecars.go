package doctor

import (
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// leastSidecars holds the minimum versions by the last part of the image's name.
var leastSidecars = map[string]string{
	// Long node names in the labels of capacity objects (5.3); no volume is lost when its node is
	// removed during its creation.
	"csi-provisioner": "6.0",
	// Earlier versions repeat ControllerUnpublishVolume until the attachment is removed.
	"csi-attacher": "4.9",
	// A failed expansion can be cancelled by requesting a smaller size.
	"csi-resizer": "1.13",
}

// snapshotter is the sidecar that needs the snapshot API.
const snapshotter = "csi-snapshotter"

// judgeSidecars judges the containers of the driver's pod. snapshots: the API server serves the
// snapshot API.
func judgeSidecars(pod kube.Pod, snapshots bool) []Check {
	var checks []Check
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		image, tag := splitImage(c.Image)
		if least, known := leastSidecars[image]; known {
			checks = append(checks, judgeSidecar(image, tag, least))
		}
		if image == snapshotter && !snapshots {
			checks = append(checks, failure("sidecar "+image, "the API server does not serve snapshot.storage.k8s.io/v1", "install the snapshot CRDs and the snapshot-controller, or disable snapshots"))
		}
	}
	return checks
}

func judgeSidecar(image, tag, least string) Check {
	name := "sidecar " + image
	switch {
	case tag == "":
		return skipped(name, "its image has only a digest")
	case !atLeast(strings.TrimPrefix(tag, "v"), least):
		return warning(name, tag+" is older than "+least, "use "+least+" or newer")
	}
	return ok(name, "%s", tag)
}

// splitImage parses [registry[:port]/][path/]name[:tag][@digest].
func splitImage(image string) (name, tag string) {
	image, _, _ = strings.Cut(image, "@")
	last := image[strings.LastIndex(image, "/")+1:]
	name, tag, _ = strings.Cut(last, ":")
	return name, tag
}
