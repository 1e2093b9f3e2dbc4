package doctor

import (
	"net/url"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
)

// forwardingChecks look at what stands between the controller and the nodes; at
// nothing where no call is forwarded.
func forwardingChecks(f *driver.Forwarding, o Options, driverName string, serving driverFacts) []Check {
	if f == nil {
		return nil
	}
	checks := []Check{judgeCertificates(pki.OpenDirectory(f.CertificatesDir(o.StateDir)), owner(f, o, driverName))}
	if f.Controller() && serving.ready {
		checks = append(checks, judgeNodes(serving.nodes))
	}
	return checks
}

// owner is whose certificate it has to be; nil if the node's name is not known here.
func owner(f *driver.Forwarding, o Options, driverName string) *url.URL {
	switch {
	case f.Controller():
		return pki.ControllerURI(driverName)
	case o.Pod.Node != "":
		return pki.NodeURI(driverName, o.Pod.Node)
	}
	return nil
}

func judgeCertificates(dir *pki.Directory, owner *url.URL) Check {
	const name = "certificates"
	err := dir.Usable()
	if owner != nil {
		err = dir.UsableAs(owner)
	}
	if err != nil {
		return failure(name, err.Error(), "put them there; in Kubernetes the driver gets them itself, and its log says what keeps it (docs/kubernetes.md, \"Certificates\")")
	}
	return ok(name, "they are good")
}

// judgeNodes takes the error of a list of all volumes, which wants every node.
func judgeNodes(err error) Check {
	const name = "nodes"
	if err != nil {
		return failure(name, reason(err), "if it names a command, decide whether to run it (docs/kubernetes.md, \"Which node has a pool\"); else look at the drivers there; in Kubernetes delete the Node object of one that is gone for good, else take it out of forwarding.nodes")
	}
	return ok(name, "all answer")
}
