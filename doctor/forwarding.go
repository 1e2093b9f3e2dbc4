package doctor

import (
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pki"
)

// forwardingChecks look at what stands between the controller and the nodes; at
// nothing where no call is forwarded.
func forwardingChecks(f *driver.Forwarding, stateDir string, serving driverFacts) []Check {
	if f == nil {
		return nil
	}
	checks := []Check{judgeCertificates(f.CertificatesDir(stateDir))}
	if f.Controller() && serving.ready {
		checks = append(checks, judgeNodes(serving.nodes))
	}
	return checks
}

func judgeCertificates(dir string) Check {
	const name = "certificates"
	if err := pki.OpenDirectory(dir).Usable(); err != nil {
		return failure(name, err.Error(), "put them there; in Kubernetes the driver gets them itself, and its log says what keeps it (docs/kubernetes.md, \"Certificates\")")
	}
	return ok(name, "those in %s are good", dir)
}

// judgeNodes takes the error of a list of all volumes, which wants every node.
func judgeNodes(err error) Check {
	const name = "nodes"
	if err != nil {
		return failure(name, reason(err), "look at the driver's pods on those nodes; delete the Node object of one that is gone for good")
	}
	return ok(name, "all answer")
}
