package pki

import "net/url"

// ControllerURI names the controller of a driver in its certificate.
func ControllerURI(driver string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/controller"}
}

// NodeURI names one node of a driver in its certificate. The driver's name is a
// domain name, as CSI has it; the node's may be any.
func NodeURI(driver, node string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/node/" + node, RawPath: "/node/" + url.PathEscape(node)}
}
