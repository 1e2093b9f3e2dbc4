package doctor

import (
	"net/url"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
)

// forwardingChecks checks the connections between the controller and the nodes; none if calls are not
// forwarded.
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

// owner returns the required URI of the certificate; nil if the node's name is unknown.
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
		return failure(name, err.Error(), "put them there; in Kubernetes the driver requests them itself, and its log has the reason of a failure (docs/kubernetes.md, \"Certificates\")")
	}
	return ok(name, "they are valid")
}

// judgeNodes judges the error of a list of all volumes, for which every node must answer.
func judgeNodes(err error) Check {
	const name = "nodes"
	if err != nil {
		return failure(name, reason(err), "if it names a command, decide whether to run it (docs/kubernetes.md, \"Which node has a pool\"); otherwise check the drivers there; if a node was removed permanently, delete its Node object in Kubernetes, or remove it from forwarding.nodes")
	}
	return ok(name, "all answer")
}
