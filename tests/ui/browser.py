"""A real Chromium: looks at pages, clicks and types as a person does."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.helpers.waiting import wait_until

WIDTH, HEIGHT = 1600, 1000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
# Pages are drawn within a second or two; a busy machine takes longer.
DEADLINE_S = 60.0
_POLL_S = 0.2


def browser_path() -> str:
    """Path of an installed Chromium.

    Raises:
        FileNotFoundError: when there is none, or no driver for it.
    """
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None or shutil.which(DRIVER) is None:
        raise FileNotFoundError(
            "no Chromium with chromedriver found; install both, such as: apt-get install chromium chromium-driver"
        )
    return found


class Browser:
    """One window on one Dagster.

    Args:
        url: address of the webserver.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        options = webdriver.ChromeOptions()
        options.binary_location = browser_path()
        for argument in (
            "--headless=new",
            "--no-sandbox",  # in a container there is no user namespace for one; the pages are our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
            f"--window-size={WIDTH},{HEIGHT}",
        ):
            options.add_argument(argument)
        self._driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
        # a window's size counts its frame as well, which a picture does not show
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.quit()

    def open(self, path: str) -> None:
        """Open a page of Dagster's."""
        self._driver.get(self.url + path)

    @property
    def text(self) -> str:
        """All text that is shown."""
        try:
            return self._driver.find_element(By.TAG_NAME, "body").text
        except StaleElementReferenceException:
            return ""

    def see(self, *texts: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until all of these are shown."""

        def missing() -> list[str]:
            shown = self.text
            return [text for text in texts if text not in shown]

        try:
            wait_until(lambda: not missing(), deadline_s, poll_s=_POLL_S)
        except AssertionError:
            where = f"within {deadline_s:.0f} s at {self._driver.current_url}"
            raise AssertionError(f"not shown {where}: {missing()}; shown is:\n{self.text}") from None

    def find(self, selector: str, *, text: str | None = None, deadline_s: float = DEADLINE_S) -> WebElement:
        """Wait for an element that is shown; a selector that begins with `/` is XPath, any other CSS."""
        how = By.XPATH if selector.startswith(("/", "(")) else By.CSS_SELECTOR

        def shown() -> WebElement | None:
            try:
                return next(
                    (
                        each
                        for each in self._driver.find_elements(how, selector)
                        if each.is_displayed() and (text is None or text in each.text)
                    ),
                    None,
                )
            except StaleElementReferenceException:
                return None

        what = f"{selector} {text or ''} at {self._driver.current_url}"
        found = wait_until(shown, deadline_s, what=what, poll_s=_POLL_S)
        assert found is not None
        return found

    def click(self, selector: str, *, text: str | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Click an element as soon as it can be clicked."""

        def clicked() -> bool:
            try:
                element = self.find(selector, text=text, deadline_s=deadline_s)
                if not element.is_enabled():
                    return False
                element.click()
            except WebDriverException:  # drawn anew, or below something that is still moving
                return False
            return True

        wait_until(clicked, deadline_s, what=f"click on {selector} {text or ''}", poll_s=_POLL_S)

    def click_button(self, label: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Click a button, link or tab with this label."""
        quoted = f'"{label}"'
        self.click(
            f"(//button | //a | //*[@role='tab'] | //*[@role='button'])[normalize-space(.)={quoted}]",
            deadline_s=deadline_s,
        )

    def write(self, selector: str, text: str) -> None:
        """Replace what stands in a field."""
        field = self.find(selector)
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def edit(self, text: str) -> None:
        """Replace the text of the page's code editor."""
        self.find(".CodeMirror")
        self._driver.execute_script(
            "document.querySelector('.CodeMirror').CodeMirror.setValue(arguments[0]);", text
        )

    def switch(self) -> None:
        """Turn the page's first switch, which is an invisible checkbox below what is drawn."""
        wait_until(
            lambda: self._driver.find_elements(By.CSS_SELECTOR, "input[type='checkbox']"),
            DEADLINE_S,
            what="a switch",
        )
        self._driver.execute_script("document.querySelector(\"input[type='checkbox']\").click();")

    def await_page(self, part: str, deadline_s: float = DEADLINE_S) -> str:
        """Wait until the address holds this part; returns the address."""
        wait_until(lambda: part in self._driver.current_url, deadline_s, what=f"page {part}", poll_s=_POLL_S)
        return self._driver.current_url

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for something that the page does not show."""
        wait_until(condition, deadline_s, what=what, poll_s=_POLL_S)

    def picture(self, path: Path) -> None:
        """Save what is shown as a PNG."""
        assert self._driver.save_screenshot(str(path))

    def scroll_to(self, selector: str) -> None:
        """Bring an element into view."""
        self._driver.execute_script("arguments[0].scrollIntoView({block: 'center'});", self.find(selector))
