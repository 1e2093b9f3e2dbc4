package pki

import "net/url"

// ControllerURI returns the URI in the certificate of a driver's controller.
func ControllerURI(driver string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/controller"}
}

// NodeURI returns the URI in the certificate of a node. The driver's name is a domain name (CSI,
// GetPluginInfo). The node's name may contain any characters.
func NodeURI(driver, node string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/node/" + node, RawPath: "/node/" + url.PathEscape(node)}
}
