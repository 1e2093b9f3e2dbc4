package doctor

import (
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// leastSidecars are the oldest versions that do what is relied on, by the last
// part of the image's name.
var leastSidecars = map[string]string{
	// Long node names in the labels of capacity objects (5.3), and no volume lost
	// when its node goes away while it is made.
	"csi-provisioner": "6.0",
	// Before, a volume was unpublished over and over until its attachment was gone.
	"csi-attacher": "4.9",
	// An expansion that cannot be may be taken back by asking for less.
	"csi-resizer": "1.13",
}

// snapshotter is the sidecar that wants the API of snapshots.
const snapshotter = "csi-snapshotter"

// judgeSidecars looks at the containers of the driver's own pod. snapshots: the
// API server serves the group of snapshots.
func judgeSidecars(pod kube.Pod, snapshots bool) []Check {
	var checks []Check
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		image, tag := splitImage(c.Image)
		if least, known := leastSidecars[image]; known {
			checks = append(checks, judgeSidecar(image, tag, least))
		}
		if image == snapshotter && !snapshots {
			checks = append(checks, failure("sidecar "+image, "the API server does not serve snapshot.storage.k8s.io/v1", "install the snapshot CRDs and the snapshot-controller, or switch snapshots off"))
		}
	}
	return checks
}

func judgeSidecar(image, tag, least string) Check {
	name := "sidecar " + image
	switch {
	case tag == "":
		return skipped(name, "its image is named by digest alone")
	case !atLeast(strings.TrimPrefix(tag, "v"), least):
		return warning(name, tag+" is older than "+least, "use "+least+" or newer")
	}
	return ok(name, "%s", tag)
}

// splitImage takes [registry[:port]/][path/]name[:tag][@digest] apart.
func splitImage(image string) (name, tag string) {
	image, _, _ = strings.Cut(image, "@")
	last := image[strings.LastIndex(image, "/")+1:]
	name, tag, _ = strings.Cut(last, ":")
	return name, tag
}
