package pki

import "net/url"

// ControllerURI names the controller of a driver in its certificate.
func ControllerURI(driver string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/controller"}
}

// NodeURI names a node of a driver in its certificate. The driver's name is a domain name (CSI,
// GetPluginInfo); the node's name is arbitrary.
func NodeURI(driver, node string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/node/" + node, RawPath: "/node/" + url.PathEscape(node)}
}
