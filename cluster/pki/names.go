package pki

import (
	"net/url"
	"strings"
)

// ControllerURI returns the URI in the certificate of a driver's controller.
func ControllerURI(driver string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/controller"}
}

// NodeURI returns the URI in the certificate of a node. The driver's name is a domain name (CSI,
// GetPluginInfo). The node's name may contain any characters.
func NodeURI(driver, node string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: driver, Path: "/node/" + node, RawPath: "/node/" + url.PathEscape(node)}
}

// nodeIn returns the name of the node in a URI that NodeURI returned for a driver.
func nodeIn(driver string, uri *url.URL) (node string, ok bool) {
	node, ok = strings.CutPrefix(uri.Path, "/node/")
	return node, ok && node != "" && uri.String() == NodeURI(driver, node).String()
}
